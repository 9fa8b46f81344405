"""The embedded engine: vLLM in this process, or in one of its own, with the plugin on."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, overload

from minipic_backend.assembly import Assembly
from minipic_backend.config import (
    CONFIG_KEY,
    KeyEncoding,
    Offsets,
    SpanConfig,
    SpanOptions,
    Technique,
    resolve_technique,
)
from minipic_backend.driver import EngineDriver, Handle
from minipic_backend.errors import ConfigurationError, ContextWindowError, PromptError
from minipic_backend.launch import engine_arguments, start_driver
from minipic_backend.layout import LaidOutPrompt, Layout, explain_rows
from minipic_backend.prefixes import RecentPrefixes
from minipic_backend.prompt import Prompt
from minipic_backend.results import Chunk, Explanation, Result, WarmReport
from minipic_backend.sampling import split_options

__all__ = ["Engine"]

_WARM_CHUNK = 2048
"""Tokens of documents in one warming prompt: small enough for progress and for little rework."""


@dataclass(frozen=True, slots=True)
class _Job:
    laid_out: LaidOutPrompt
    sampling_params: Any
    request: dict[str, Any]
    started_at: float


class Engine:
    """vLLM, embedded, with spans.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        technique: "primed" (default), "block_attention", or "full" (no spans: exact attention).
        frame: overrides the technique's: "none" or "prefix".
        primer: overrides the technique's: "auto", False, a passage, or a sequence of passages.
        late: overrides the technique's: how many of the best-ranked documents are computed in
            full context, last.
        key_encoding: "span_local" or "unrotated"; how keys are cached.
        offsets: "compact" or "padded"; where documents stand logically.
        see_markers: whether later tokens see the token in front of each span.
        markers: three token strings or ids (SSep, PDep, pad) instead of those chosen by rule.
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
        frame: Literal["none", "prefix"] | None = None,
        primer: Any = None,
        late: int | None = None,
        key_encoding: KeyEncoding = "span_local",
        offsets: Offsets = "compact",
        see_markers: bool = True,
        markers: Sequence[str | int] | None = None,
        process: Literal["inline", "separate"] = "inline",
        kv_cache_gib: float | None = None,
        verbose: bool = False,
        **engine_args: Any,
    ) -> None:
        if process not in ("inline", "separate"):
            raise ConfigurationError(f"process={process!r}: choose 'inline' or 'separate'")
        self._model = model
        self._defaults: dict[str, Any] = {
            "technique": technique,
            "frame": frame,
            "primer": primer,
            "late": late,
            "offsets": offsets,
            "see_markers": see_markers,
        }
        self._layout_choice({})  # unknown values fail here, not after a model has loaded
        spans: dict[str, Any] = {"key_encoding": key_encoding}
        if markers is not None:
            spans["markers"] = list(markers)
        arguments = engine_arguments(model, spans, kv_cache_gib, engine_args, verbose=verbose)
        self._driver: EngineDriver = start_driver(
            model, arguments, separate_process=process == "separate"
        )
        self._finalizer = weakref.finalize(self, self._driver.close)
        llm = self._driver.llm
        config = llm.vllm_config
        self._config = SpanConfig.from_dict(config.additional_config[CONFIG_KEY])
        self._max_model_len: int = config.model_config.max_model_len
        self._sampling_defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        self._tokenizer = llm.get_tokenizer()
        self._layout = Layout(self._tokenizer, self._config)
        self._prefixes = RecentPrefixes()

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

    # ---- generation -------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt | str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt | str], **options: Any) -> list[Result]: ...
    def generate(
        self, prompt: Prompt | str | Sequence[Prompt | str], **options: Any
    ) -> Result | list[Result]:
        """Answers one prompt, or a list of them together.

        Raises:
            PromptError: a prompt that cannot be laid out, is too long, or is refused by vLLM.
            ConfigurationError: an unknown option.
            EngineClosedError: the engine is closed.
            RequestAbortedError: somebody aborted the request.
        """
        if isinstance(prompt, Prompt | str):
            return self._finish(*self._submit(self._prepare(prompt, options)))
        jobs = [self._prepare(one, options) for one in _sequence(prompt)]
        running = [self._submit(job) for job in jobs]
        try:
            return [self._finish(handle, assembly) for handle, assembly in running]
        except BaseException:
            for handle, _ in running:
                self._driver.abort(handle.request_id)
            raise

    def stream(self, prompt: Prompt | str, **options: Any) -> Generator[Chunk, None, None]:
        """Yields an answer piece by piece; closing the generator aborts the request."""
        handle, assembly = self._submit(self._prepare(prompt, options))
        with closing(handle.deltas()) as deltas:
            for delta in deltas:
                yield from assembly.add(delta)

    @overload
    async def agenerate(self, prompt: Prompt | str, **options: Any) -> Result: ...
    @overload
    async def agenerate(self, prompt: Sequence[Prompt | str], **options: Any) -> list[Result]: ...
    async def agenerate(
        self, prompt: Prompt | str | Sequence[Prompt | str], **options: Any
    ) -> Result | list[Result]:
        """`generate` for event loops; cancelling it aborts the request."""
        if isinstance(prompt, Prompt | str):
            assembly: Assembly | None = None
            handle, assembly = self._submit(await asyncio.to_thread(self._prepare, prompt, options))
            async with aclosing(handle.adeltas()) as deltas:
                async for delta in deltas:
                    assembly.add(delta)
            return assembly.result()
        tasks = [asyncio.ensure_future(self.agenerate(one, **options)) for one in _sequence(prompt)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            # Their requests are aborted when this returns, not some time later.
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def astream(self, prompt: Prompt | str, **options: Any) -> AsyncGenerator[Chunk, None]:
        """`stream` for event loops."""
        handle, assembly = self._submit(await asyncio.to_thread(self._prepare, prompt, options))
        async with aclosing(handle.adeltas()) as deltas:
            async for delta in deltas:
                for chunk in assembly.add(delta):
                    yield chunk

    def abort(self, request_id: str) -> None:
        """Aborts a request by its id; unknown and finished ones are ignored."""
        self._driver.abort(request_id)

    # ---- spans ------------------------------------------------------------------------------

    def explain(self, prompt: Prompt | str, **options: Any) -> Explanation:
        """How a prompt is laid out, and which segments the cache holds now."""
        job = self._prepare(prompt, options)
        return explain_rows(job.laid_out, self._cached_tokens(job))

    def warm(
        self,
        documents: Iterable[str],
        *,
        prompt: Prompt | None = None,
        progress: bool = False,
        **options: Any,
    ) -> WarmReport:
        """Computes documents ahead of time.

        Args:
            documents: texts.
            prompt: with frame "prefix", a prompt with the prefix that the documents will stand
                behind. Default: the prefixes that this engine met last.
            progress: show a progress bar.
            options: layout options and `cache_salt`, as for `generate`.

        Raises:
            PromptError: frame "prefix", no `prompt`, and no prefix met so far; or a document that
                is no text or longer than the context.
        """
        from tqdm.auto import tqdm

        started = time.perf_counter()
        sampling, layout, request = split_options(options)
        if sampling:
            raise ConfigurationError(f"warm takes no {', '.join(sorted(sampling))}")
        settings, span_options = self._layout_choice(layout)
        texts = list(documents)
        if not settings.spans:
            return WarmReport(0, 0, 0, 0.0)
        prefixes: list[tuple[int, ...]]
        if settings.frame == "none":
            prefixes = [()]
        elif prompt is not None:
            prefixes = [self._layout.lay_out_prefix(prompt, settings)]
        else:
            prefixes = self._prefixes.latest()
            if not prefixes:
                raise PromptError(
                    "With frame 'prefix' a document is computed behind the prompt's prefix, and "
                    "this engine has met none yet: pass prompt=, a prompt with that prefix"
                )
        params = self._sampling_params({"max_tokens": 1, "temperature": 0.0}, span_options)
        jobs = [
            _Job(LaidOutPrompt(ids, None, ()), params, dict(request), started)
            for prefix in prefixes
            for ids in self._layout.warm_prompts(
                texts,
                prefix_token_ids=prefix,
                max_tokens=min(self._max_model_len - 1, len(prefix) + _WARM_CHUNK),
            )
        ]
        computed = cached = 0
        for job in tqdm(jobs, desc="Warming spans", unit="prompt", disable=not progress):
            usage = self._finish(*self._submit(job)).usage
            cached += usage.cached_tokens or 0
            computed += usage.prompt_tokens - (usage.cached_tokens or 0)
        seconds = time.perf_counter() - started
        return WarmReport(len(set(texts)) * len(prefixes), computed, cached, seconds)

    def reset_cache(self) -> None:
        """Forgets every cached block. Requests under way keep theirs.

        Raises:
            EngineError: blocks are in use, so that nothing was forgotten.
        """
        from minipic_backend.errors import EngineError

        if not self._driver.call(lambda llm: llm.reset_prefix_cache()):
            raise EngineError("The cache is in use by running requests; nothing was reset")

    # ---- tokens -----------------------------------------------------------------------------

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, with special tokens off."""
        return list(self._layout.encoder.encode(text))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, with special tokens off."""
        return len(self.token_ids(text))

    # ---- life -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops the engine and frees its memory. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------

    def _layout_choice(self, chosen: Mapping[str, Any]) -> tuple[Any, SpanOptions]:
        """A call's technique settings and span options, over the engine's defaults.

        A technique named by the call brings its own frame, primer and late documents.
        """
        values = dict(self._defaults)
        if chosen.get("technique") not in (None, values["technique"]):
            values.update(frame=None, primer=None, late=None)
        values.update(chosen)
        settings = resolve_technique(
            values["technique"],
            frame=values["frame"],
            primer=values["primer"],
            late=values["late"],
        )
        options = SpanOptions(settings.frame, values["offsets"], values["see_markers"])
        return settings, options

    def _prepare(self, prompt: Prompt | str, options: Mapping[str, Any]) -> _Job:
        started = time.perf_counter()
        sampling, layout, request = split_options(options)
        settings, span_options = self._layout_choice(layout)
        if isinstance(prompt, str):
            prompt = Prompt(prompt)
        elif not isinstance(prompt, Prompt):
            raise PromptError(f"A prompt is a Prompt or a str, not {type(prompt).__name__}")
        laid_out = self._layout.lay_out(prompt, settings, options=span_options)
        if len(laid_out.token_ids) >= self._max_model_len:
            raise ContextWindowError(len(laid_out.token_ids), self._max_model_len)
        self._prefixes.add(laid_out.prefix_token_ids)
        return _Job(laid_out, self._sampling_params(sampling, span_options), dict(request), started)

    def _sampling_params(self, given: Mapping[str, Any], options: SpanOptions) -> Any:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        values = {"max_tokens": None, **self._sampling_defaults, **given}
        try:
            if isinstance(values.get("structured_outputs"), Mapping):
                values["structured_outputs"] = StructuredOutputsParams(
                    **values["structured_outputs"]
                )
            return SamplingParams(
                **values,
                output_kind=RequestOutputKind.DELTA,
                extra_args={CONFIG_KEY: options.to_dict()},
            )
        except (ValueError, TypeError, VLLMValidationError) as error:
            raise ConfigurationError(str(error)) from error

    def _submit(self, job: _Job) -> tuple[Handle, Assembly]:
        handle = self._driver.submit(job.laid_out.token_ids, job.sampling_params, **job.request)
        return handle, Assembly(
            handle.request_id,
            num_prompt_tokens=len(job.laid_out.token_ids),
            num_pads=job.laid_out.num_pads,
            started_at=job.started_at,
        )

    def _finish(self, handle: Handle, assembly: Assembly) -> Result:
        with closing(handle.deltas()) as deltas:
            for delta in deltas:
                assembly.add(delta)
        return assembly.result()

    def _cached_tokens(self, job: _Job) -> list[int] | None:
        """Cached tokens of each segment; None where the scheduler lives in another process."""
        ids = list(job.laid_out.token_ids)
        salt = job.request.get("cache_salt")

        def probe(llm: Any) -> list[bool] | None:
            core = getattr(llm.engine_core, "engine_core", None)
            if core is None or not hasattr(core, "scheduler"):
                return None
            found: list[bool] = core.scheduler.probe_cached_blocks(ids, job.sampling_params, salt)
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


def _sequence(prompts: object) -> Sequence[Prompt | str]:
    if not isinstance(prompts, Sequence):
        raise PromptError(
            f"A prompt is a Prompt, a str, or a sequence of them, not {type(prompts).__name__}"
        )
    return prompts
