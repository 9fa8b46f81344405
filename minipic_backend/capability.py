"""What a server says about itself, and what a client checks before it sends anything.

Both ends compute segments from the token ids alone, so they must agree on marker ids, block size
and tokenizer. The route that gives this is `GET /v1/minipic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from minipic_backend.config import Frame, KeyEncoding, Offsets, SpanConfig, Technique
from minipic_backend.errors import ConfigurationError

__all__ = ["PROTOCOL", "ROUTE", "TOKENIZER_ROUTE", "Capability"]

ROUTE = "/minipic"
"""Behind a server's `/v1`, so that vLLM's `--api-key` guards it as it guards the rest."""

TOKENIZER_ROUTE = "/minipic/tokenizer"

PROTOCOL = 2
"""Raised whenever client and server of different versions could misunderstand each other."""


@dataclass(frozen=True, slots=True)
class Capability:
    """A server with the plugin on.

    Args:
        minipic_version: of the plugin.
        vllm_version: of the server.
        models: names that requests may give as `model`, the server's own name first.
        max_model_len: tokens that a prompt and its answer may have together.
        config: markers, pad, block size, key encoding, defaults of span options.
        tokenizer_digest: see `tokenizer_digest`; of tokens and chat template together.
        sampling_defaults: what vLLM takes where a request says nothing, from the model's own
            generation config.
        reports_cached_tokens: whether usage names them (`--enable-prompt-tokens-details`).
        protocol: see `PROTOCOL`.
        techniques, frames, offsets, key_encodings: names that this server's plugin knows.
    """

    minipic_version: str
    vllm_version: str
    models: tuple[str, ...]
    max_model_len: int
    config: SpanConfig
    tokenizer_digest: str
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    reports_cached_tokens: bool = False
    protocol: int = PROTOCOL
    techniques: tuple[str, ...] = get_args(Technique)
    frames: tuple[str, ...] = get_args(Frame)
    offsets: tuple[str, ...] = get_args(Offsets)
    key_encodings: tuple[str, ...] = get_args(KeyEncoding)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: Any) -> Capability:
        """The inverse of `to_dict`; keys of a newer server that we do not know are left out.

        Raises:
            ConfigurationError: another protocol, or not a capability at all.
        """
        from minipic_backend import __version__

        if not isinstance(values, Mapping) or "protocol" not in values:
            raise ConfigurationError(
                f"The server answers {ROUTE} with something else than MiniPIC's capabilities: is "
                "base_url right, with its /v1?"
            )
        if values["protocol"] != PROTOCOL:
            raise ConfigurationError(
                f"The server runs MiniPIC {values.get('minipic_version')}, this client is "
                f"{__version__}, and they do not speak the same protocol: install the same "
                "version on both sides"
            )
        known = {item.name for item in fields(cls)}
        try:
            given = {key: value for key, value in values.items() if key in known}
            given["config"] = SpanConfig.from_dict(given["config"])
            for name in ("models", "techniques", "frames", "offsets", "key_encodings"):
                given[name] = tuple(given[name])
            return cls(**given)
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"The server's capabilities (MiniPIC {values.get('minipic_version')}) cannot be "
                f"read by this client ({__version__}): {error}. Install the same version on both "
                "sides"
            ) from error
