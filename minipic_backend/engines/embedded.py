"""The embedded engine: vLLM in this process, or in one of its own, with the plugin on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from minipic_backend.config import (
    CONFIG_KEY,
    Frame,
    KeyEncoding,
    Offsets,
    Policy,
    SpanConfig,
    SpanOptions,
    Technique,
)
from minipic_backend.engines.adapter import adapter_arguments, adapter_request
from minipic_backend.engines.base import BaseEngine, Job
from minipic_backend.engines.driver import EngineDriver, Handle
from minipic_backend.engines.launch import engine_arguments, start_driver
from minipic_backend.errors import ConfigurationError, EngineError, shown
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.plugin import seams

__all__ = ["Engine"]

_LISTS = ("stop", "stop_token_ids", "bad_words")
"""Options that vLLM asserts to be lists."""


class Engine(BaseEngine):
    """vLLM, embedded, with spans.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        technique: "primed" (default), "block_attention", "epic", "epic_paper", "selective",
            "prompt_cache", or "full" (no spans: exact attention). See docs/techniques.md.
        frame: overrides the technique's: "none", "prefix" or "universal".
        primer: overrides the technique's: "auto", False, a passage, or a sequence of passages.
        see_primer: whether the question, too, sees the primer; default: only documents do.
        best_last: whether ranked documents stand in the order of their ranks, the best one last;
            default: with "primed" they do.
        late: overrides the technique's: how many of the best-ranked documents are computed in
            full context, last.
        blocks: overrides the technique's: how many of each document's first blocks are computed
            anew, in context.
        budget: overrides the technique's: share of the documents' blocks, chosen by the question,
            that is computed anew.
        key_encoding: "span_local" or "unrotated"; how keys are cached.
        offsets: "compact" or "padded"; where documents stand logically.
        policy: how missing documents are computed (docs/scheduling.md): "interleaved", "batched"
            or "in_place".
        see_markers: whether later tokens see the token in front of each span.
        markers: three token strings or ids (SSep, PDep, pad) instead of those chosen by rule.
        adapter: folder of a LoRA adapter that every request uses, such as `minipic adapt` makes.
        process: "inline" runs vLLM in this process: a plain script works as it is. "separate"
            gives it one of its own; the script then needs `if __name__ == "__main__":`.
        kv_cache_gib: GiB of memory for the KV cache; default on a CPU: 2.
        verbose: let vLLM log; otherwise it logs warnings only.
        engine_args: any further argument of vLLM's `EngineArgs` (`max_model_len`, `dtype`, …).

    Raises:
        ModelNotFoundError: no such model.
        UnsupportedModelError: its attention or rotary embedding does not allow spans.
        ConfigurationError: an unknown option.
        EngineStartError: vLLM did not start.
    """

    def __init__(
        self,
        model: str,
        *,
        technique: Technique = "primed",
        frame: Frame | None = None,
        primer: Any = None,
        see_primer: bool | None = None,
        best_last: bool | None = None,
        late: int | None = None,
        blocks: int | None = None,
        budget: float | None = None,
        key_encoding: KeyEncoding = "span_local",
        offsets: Offsets = "compact",
        policy: Policy = "interleaved",
        see_markers: bool = True,
        markers: Sequence[str | int] | None = None,
        adapter: str | None = None,
        process: Literal["inline", "separate"] = "inline",
        kv_cache_gib: float | None = None,
        verbose: bool = False,
        **engine_args: Any,
    ) -> None:
        if process not in ("inline", "separate"):
            raise ConfigurationError(f"process={shown(process)}: choose 'inline' or 'separate'")
        self._model = model
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
        spans: dict[str, Any] = {"key_encoding": key_encoding, "policy": policy}
        if markers is not None:
            spans["markers"] = list(markers)
        if adapter is not None:
            engine_args = {**adapter_arguments(adapter), **engine_args}
        arguments = engine_arguments(model, spans, kv_cache_gib, engine_args, verbose=verbose)
        self._driver: EngineDriver = start_driver(
            model, arguments, separate_process=process == "separate"
        )
        self._adapter = None if adapter is None else adapter_request(adapter)
        self._finalizer = weakref.finalize(self, self._driver.close)
        llm = self._driver.llm
        config = llm.vllm_config
        self._config = SpanConfig.from_dict(config.additional_config[CONFIG_KEY])
        self._max_model_len: int = config.model_config.max_model_len
        self._sampling_defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        self._tokenizer = llm.get_tokenizer()
        self._layout = Layout(self._tokenizer, self._config)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The model as it was named."""
        return self._model

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._max_model_len

    @property
    def block_size(self) -> int:
        """Tokens in a block of the KV cache."""
        return self._config.block_size

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        return self._tokenizer

    @property
    def layout(self) -> Layout:
        """Turns prompts into token ids."""
        return self._layout

    def __repr__(self) -> str:
        state = "closed" if self._driver.closed else self._defaults["technique"]
        return f"Engine({self._model!r}, {state})"

    def abort(self, request_id: str) -> None:
        self._driver.abort(request_id)

    def reset_cache(self) -> None:
        """Forgets every cached block. Requests under way keep theirs.

        Raises:
            EngineError: blocks are in use, so that nothing was forgotten.
        """
        if not self._driver.call(lambda llm: llm.reset_prefix_cache()):
            raise EngineError("The cache is in use; nothing was reset: wait for running requests")

    def close(self) -> None:
        """Stops the engine and frees its memory. Safe to call twice."""
        self._finalizer()

    # ---- inside -----------------------------------------------------------------------------

    def _sampling_params(self, given: Mapping[str, Any], options: SpanOptions) -> Any:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        from minipic_backend.plugin.requests import as_received

        values = {"max_tokens": None, **self._sampling_defaults, **given}
        for name in _LISTS:
            if isinstance(values.get(name), tuple | set | frozenset):
                values[name] = list(values[name])
        try:
            if isinstance(values.get("structured_outputs"), Mapping):
                values["structured_outputs"] = StructuredOutputsParams(
                    **values["structured_outputs"]
                )
            params = SamplingParams(
                **values,
                output_kind=RequestOutputKind.DELTA,
                extra_args={CONFIG_KEY: options.to_dict()},
            )
            return as_received(params)
        except (ValueError, TypeError, VLLMValidationError) as error:
            raise ConfigurationError(str(error)) from error
        except AssertionError as error:
            raise ConfigurationError(f"{', '.join(_LISTS)}: each must be a list") from error

    def _start(self, job: Job) -> Handle:
        return self._driver.submit(
            job.laid_out.token_ids, job.sampling_params, adapter=self._adapter, **job.request
        )

    def _cached_tokens(self, job: Job) -> list[int] | None:
        """Cached tokens of each segment; None where the scheduler lives in another process."""
        ids = list(job.laid_out.token_ids)
        salt = job.request.get("cache_salt")

        def probe(llm: Any) -> list[bool] | None:
            scheduler = seams.scheduler_here(llm)
            if scheduler is None:
                return None
            found: list[bool] = scheduler.probe_cached_blocks(
                ids, job.sampling_params, salt, self._adapter
            )
            return found

        held = self._driver.call(probe)
        if held is None:
            return None
        size = self._config.block_size
        table = job.laid_out.table
        if table is None:
            return [sum(held) * size]
        return [
            sum(held[segment.start // size : segment.end // size]) * size
            for segment in table.segments
        ]
