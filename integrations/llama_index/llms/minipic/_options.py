"""Options of the model, and how a call's own are laid over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer, model_validator

from minipic_backend import EngineProtocol
from minipic_backend.choices import check_choice
from minipic_backend.config import Frame, Offsets, Technique
from minipic_backend.engines.shared import without_secrets
from minipic_backend.sampling import LAYOUT_OPTIONS, REQUEST_OPTIONS, split_options

__all__ = ["ModelOptions"]

_OPTION_FIELDS = (
    "technique",
    "frame",
    "primer",
    "see_primer",
    "best_last",
    "late",
    "blocks",
    "budget",
    "offsets",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


class ModelOptions(BaseModel):
    """Options of a model served by a MiniPIC engine. None leaves a choice to the engine.

    Args:
        model: name or path of the model; empty, with `base_url`: the one that is served.
        base_url: a server's address; None runs the model in this process.
        engine: an engine of your own, such as `minipic_backend.testing.FakeEngine`. It is not
            closed with the model, nor pickled.
        engine_options: for building the embedded engine: `key_encoding`, or vLLM's own options.
        technique, frame, primer, see_primer, best_last, late, blocks, budget, offsets: how nodes
            are laid out and reused.
        max_tokens: the most tokens to generate; None: as many as the context has room for.
        stop: strings that end the answer; those of a call replace them.
        logprobs: alternatives per generated token to report, in `raw`.
        additional_kwargs: further sampling options, under vLLM's names.
        timeout: seconds after which a request is aborted, with `TimeoutError`.
        api_key, max_retries, headers: for a remote engine; an embedded one has no use for them.
        on_missing_plugin: on a server without the plugin: "error", or "plain" for ordinary prompts.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str
    base_url: str | None = None
    engine: EngineProtocol | None = Field(default=None, exclude=True, repr=False)
    engine_options: dict[str, Any] = Field(default_factory=dict, repr=False)

    technique: Technique | None = None
    frame: Frame | None = None
    primer: str | bool | Sequence[str] | None = None
    see_primer: bool | None = None
    best_last: bool | None = None
    late: int | None = None
    blocks: int | None = None
    budget: float | None = None
    offsets: Offsets | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)

    timeout: float | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True)
    max_retries: int = 2
    headers: dict[str, str] | None = Field(default=None, exclude=True, repr=False)
    on_missing_plugin: Literal["error", "plain"] = "error"

    @model_validator(mode="before")
    @classmethod
    def _sort_options(cls, values: Any) -> Any:
        """Take vLLM's further option names as they are, refuse unknown ones, by name."""
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if name != "class_name"}
        further = {name: values.pop(name) for name in set(values) - set(cls.model_fields)}
        if further := {**(values.get("additional_kwargs") or {}), **further}:
            split_options(further, cls.model_fields)
            values["additional_kwargs"] = further
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if "model" not in values and values.get("engine") is not None:
            values["model"] = values["engine"].model
        elif values.get("base_url") is not None:
            values.setdefault("model", "")
        return values

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        """Wrong values are told here rather than by the first call."""
        check_choice(self._own_options())
        return self

    @field_serializer("engine_options")
    def _dump_engine_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return without_secrets(options)

    def _own_options(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _OPTION_FIELDS}
        return {
            **{name: value for name, value in named.items() if value not in (None, [])},
            **self.additional_kwargs,
        }

    def _call_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options for the engine; the call's replace the model's.

        Raises:
            ConfigurationError: an unknown option.
        """
        stop = given.get("stop")
        options = {**self._own_options(), **given}
        if isinstance(stop, str):
            options["stop"] = [stop]
        split_options(options)
        return options

    def _layout_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Of a call's options, those that `warm` and `explain` have a use for."""
        options = self._call_options(given)
        return {k: v for k, v in options.items() if k in LAYOUT_OPTIONS | REQUEST_OPTIONS}
