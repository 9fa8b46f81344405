"""Options of the models, and how a call's own are laid over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from langchain_core.language_models.base import LangSmithParams
from langchain_core.utils.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

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
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


class ModelOptions(BaseModel):
    """Options of a model served by a MiniPIC engine. None leaves a choice to the engine.

    Args:
        model: name or path of the model.
        base_url: a server's address; None runs the model in this process.
        engine: an engine of your own, such as `minipic_backend.testing.FakeEngine`. It is not
            closed with the model, nor copied, pickled or dumped.
        engine_options: for building the embedded engine: `key_encoding`, or vLLM's own options.
        technique, frame, primer, see_primer, best_last, late, blocks, budget, offsets: how
            documents are laid out.
        max_tokens: the most tokens to generate; None: as many as the context has room for.
        stop: strings that end the answer; those of a call replace them.
        n: answers per prompt.
        logprobs: alternatives per generated token to report.
        model_kwargs: further sampling options, under vLLM's names.
        timeout: seconds after which a request is aborted, with `TimeoutError`.
        api_key, max_retries, headers: for a remote engine; an embedded one has no use for them. The
            key's default is the environment's MINIPIC_API_KEY.
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
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    timeout: float | None = None
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("MINIPIC_API_KEY", default=None)
    )
    max_retries: int = 2
    headers: dict[str, str] | None = Field(default=None, repr=False)
    on_missing_plugin: Literal["error", "plain"] = "error"

    @model_validator(mode="before")
    @classmethod
    def _sort_options(cls, values: Any) -> Any:
        """Take vLLM's further option names as they are, refuse unknown ones, by name."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        further = {name: values.pop(name) for name in set(values) - set(cls.model_fields)}
        if further := {**(values.get("model_kwargs") or {}), **further}:
            split_options(further, cls.model_fields)
            values["model_kwargs"] = further
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if "model" not in values and values.get("engine") is not None:
            values["model"] = values["engine"].model
        return values

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        """Wrong values are told here rather than by the first call."""
        check_choice(self._own_options())
        return self

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that an answer depends on: the key of LangChain's caches, part of traces."""
        own = self._own_options()
        if "stop" in own:  # LangChain writes the call's over this key, even where it has none
            own["default_stop"] = own.pop("stop")
        return {
            "model": self.model,
            "base_url": self.base_url,
            **own,
            "engine_options": without_secrets(self.engine_options),
        }

    def _own_options(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _OPTION_FIELDS}
        return {
            **{name: value for name, value in named.items() if value not in (None, [])},
            **self.model_kwargs,
        }

    def _call_options(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Options for the engine; the call's replace the model's."""
        given = {name: value for name, value in kwargs.items() if name != "stream"}
        options = {**self._own_options(), **given}
        if stop is not None:
            options["stop"] = stop
        split_options(options)
        return options

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(  # type: ignore[misc]  # mixin
            stop=stop or self.stop or None, **kwargs
        )
        params["ls_provider"] = "minipic"
        return params

    def _layout_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Of a call's options, those that `warm` and `explain` have a use for."""
        given = self._call_options(None, options)
        return {k: v for k, v in given.items() if k in LAYOUT_OPTIONS | REQUEST_OPTIONS}
