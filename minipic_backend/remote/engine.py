"""The remote engine: prompts are laid out here and answered by a vLLM server."""

from __future__ import annotations

import json
import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import httpx

from minipic_backend.capability import Capability
from minipic_backend.config import (
    CONFIG_KEY,
    Frame,
    KeyEncoding,
    Offsets,
    SpanOptions,
    Technique,
    TechniqueSettings,
)
from minipic_backend.engines.assembly import Assembly
from minipic_backend.engines.base import BaseEngine, Job
from minipic_backend.engines.driver import Delta, Handle
from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.remote.retries import Retries
from minipic_backend.remote.server import OnMissingPlugin, Server
from minipic_backend.remote.transport import Transport

__all__ = ["RemoteEngine"]


class _Assembly(Assembly):
    """Says so where the server does not say how much it read from the cache."""

    def _close(self, delta: Delta) -> None:
        super()._close(delta)
        if delta.num_cached_tokens is None:
            warnings.warn(
                "The server does not report cached tokens, so that usage has none: start it with "
                "--enable-prompt-tokens-details, or by `minipic serve`, which does",
                stacklevel=2,
            )


class RemoteEngine(BaseEngine):
    """A vLLM server with the plugin on (`minipic serve`), behind `EngineProtocol`.

    Nothing is sent before first use; then the server's capabilities are verified, once.

    Args:
        base_url: the server's address, with `/v1`.
        model: as the server names it; None: the one that it serves.
        api_key: what the server was started with as `--api-key`; default: `$MINIPIC_API_KEY`.
        timeout: seconds that the server may be silent, before or inside an answer.
        max_retries: how often a request is sent again after a connection error, or HTTP status 429
            or 503; never once a token has come.
        headers: further headers of every request.
        on_missing_plugin: on a server without the plugin: "error", or "plain" to send ordinary
            prompts (exact attention, without reuse of documents).
        cache_salt: of every request that names none: documents of different salts share nothing.
        tokenizer: a tokenizer, a folder or a hub name, instead of the server's own.
        key_encoding: what the server must have; None: either.
        technique, frame, primer, see_primer, best_last, late, blocks, budget, offsets, see_markers:
            as for `Engine`.
        http: what carries the requests instead of the network; for tests.

    Raises:
        ConfigurationError: an unknown value.
    """

    _assembly_type = _Assembly

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: Any = None,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        on_missing_plugin: OnMissingPlugin = "error",
        cache_salt: str | None = None,
        tokenizer: Any = None,
        technique: Technique = "primed",
        frame: Frame | None = None,
        primer: Any = None,
        see_primer: bool | None = None,
        best_last: bool | None = None,
        late: int | None = None,
        blocks: int | None = None,
        budget: float | None = None,
        key_encoding: KeyEncoding | None = None,
        offsets: Offsets = "compact",
        see_markers: bool = True,
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        _check(base_url, timeout, max_retries, on_missing_plugin)
        super().__init__(
            {
                "technique": technique,
                "frame": frame,
                "primer": primer,
                "see_primer": see_primer,
                "best_last": best_last,
                "late": late,
                "blocks": blocks,
                "budget": budget,
                "offsets": offsets,
                "see_markers": see_markers,
            }
        )
        self._model = model
        self._cache_salt = cache_salt
        self._transport = Transport(
            base_url,
            headers=_headers(api_key, headers),
            timeout_s=timeout,
            retries=Retries(max_retries),
            http=http,
        )
        self._server = Server(
            self._transport,
            model=model,
            tokenizer=tokenizer,
            on_missing_plugin=on_missing_plugin,
            key_encoding=key_encoding,
        )
        self._finalizer = weakref.finalize(self, self._transport.close)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The model as the server names it."""
        return self._model or self._server.facts().model

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._transport.base_url

    @property
    def max_model_len(self) -> int:
        return self._server.facts().max_model_len

    @property
    def block_size(self) -> int:
        """Tokens in a block of the KV cache; 1 for a server without the plugin."""
        capability = self.capability
        return capability.config.block_size if capability else 1

    @property
    def tokenizer(self) -> Any:
        """The server's tokenizer (transformers)."""
        return self._server.facts().tokenizer

    @property
    def layout(self) -> Layout:
        return self._server.facts().layout

    @property
    def capability(self) -> Capability | None:
        """What the server says about itself; None for one without the plugin."""
        return self._server.facts().capability

    def __repr__(self) -> str:
        state = "closed" if self._transport.closed else self._defaults["technique"]
        return f"RemoteEngine({self.base_url!r}, {state})"

    # ---- life -------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        self._transport.abort(request_id)

    def close(self) -> None:
        """Ends all requests and connections. Safe to call twice."""
        self._finalizer()

    # ---- inside -----------------------------------------------------------------------------

    def _layout_choice(self, chosen: Mapping[str, Any]) -> tuple[TechniqueSettings, SpanOptions]:
        settings, options = super()._layout_choice(chosen)
        server: Server | None = getattr(self, "_server", None)
        if server is None:  # being built: only the names are checked
            return settings, options
        capability = server.facts().capability
        if capability is None:
            return replace(settings, spans=False), options
        for name, value, known in (
            ("frame", options.frame, capability.frames),
            ("offsets", options.offsets, capability.offsets),
        ):
            if value not in known:
                raise ConfigurationError(
                    f"{name}={shown(value)}: this server's MiniPIC ({capability.minipic_version}) "
                    f"knows {', '.join(known)}"
                )
        return settings, options

    def _sampling_params(self, given: Mapping[str, Any], options: SpanOptions) -> dict[str, Any]:
        """The part of a request's body that says how tokens are chosen."""
        body = dict(given)
        if body.get("logprobs") is not None:
            body["return_tokens_as_token_ids"] = True
        if self.capability is not None:
            body["vllm_xargs"] = {CONFIG_KEY: json.dumps(options.to_dict())}
        return body

    def _start(self, job: Job) -> Handle:
        facts = self._server.facts()
        tokens = job.laid_out.token_ids
        request = dict(job.request)
        request_id = request.pop("request_id", None)
        body = {
            "model": facts.model,
            "prompt": list(tokens),
            # Streamed even where the caller waits for the whole: the first token is timed, and a
            # silent server is told from one at work.
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **job.sampling_params,
            **request,
        }
        if body.get("max_tokens") is None:  # which the server would take for 16
            room = facts.max_model_len - len(tokens)
            body["max_tokens"] = min(room, facts.sampling_defaults.get("max_tokens", room))
        if self._cache_salt is not None:
            body.setdefault("cache_salt", self._cache_salt)
        return self._transport.start(
            body,
            request_id=request_id,
            num_prompt_tokens=len(tokens),
            block_size=facts.capability.config.block_size if facts.capability else None,
        )

    def _cached_tokens(self, job: Job) -> list[int] | None:
        return None  # another tenant could look, too


def _check(base_url: str, timeout: float | None, max_retries: int, on_missing_plugin: str) -> None:
    if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"base_url={shown(base_url)}: an address such as http://host:8000/v1"
        )
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ConfigurationError(f"timeout={shown(timeout)}: seconds, or None to wait for ever")
    if not isinstance(max_retries, int) or max_retries < 0:
        raise ConfigurationError(f"max_retries={shown(max_retries)}: a whole number from 0")
    if on_missing_plugin not in get_args(OnMissingPlugin):
        raise ConfigurationError(
            f"on_missing_plugin={shown(on_missing_plugin)}: 'error' or 'plain'"
        )


def _headers(api_key: Any, further: Mapping[str, str] | None) -> dict[str, str]:
    key: Any = api_key if api_key is not None else os.environ.get("MINIPIC_API_KEY")
    if hasattr(key, "get_secret_value"):  # pydantic's SecretStr
        key = key.get_secret_value()
    if key:
        _check_header(str(key), "api_key")
    for name, value in (further or {}).items():
        _check_header(name, "the name of a header")
        _check_header(value, f"headers[{shown(name)}]")
    own = {"authorization": f"Bearer {key}"} if key else {}
    return {**own, **(further or {})}


def _check_header(value: object, what: str) -> None:
    """Refuses what HTTP cannot send as (part of) a header, without showing it: it may be a key."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be a str, not {type(value).__name__}")
    for index, character in enumerate(value):
        at_edge = index in (0, len(value) - 1) and character == " "
        if at_edge or not (character.isascii() and character.isprintable()):
            raise ConfigurationError(
                f"{what} has U+{ord(character):04X} at index {index}, which an HTTP header cannot "
                "carry: printable ASCII, without white space at the ends"
            )
