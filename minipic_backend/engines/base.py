"""What every engine that lays out prompts itself does the same way, embedded or remote."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar, Self, overload

from minipic_backend.choices import check_warmable, choose_layout
from minipic_backend.config import SpanOptions, TechniqueSettings
from minipic_backend.engines.assembly import Assembly
from minipic_backend.engines.driver import Handle
from minipic_backend.engines.prefixes import RecentPrefixes
from minipic_backend.engines.teacher import TokenLogprobs, follow
from minipic_backend.engines.turns import take_turn
from minipic_backend.errors import ConfigurationError, ContextWindowError, PromptError
from minipic_backend.layout.prompt_layout import LaidOutPrompt, Layout, explain_rows
from minipic_backend.prompt import Prompt
from minipic_backend.quality.compare import DEFAULT_TECHNIQUES, Comparison, compare
from minipic_backend.results import Chunk, Explanation, Result, WarmReport
from minipic_backend.sampling import split_options

__all__ = ["BaseEngine", "Job"]

# Few: layout is mostly Python, and an event loop that wants to run waits for all of them.
_layout_pool = ThreadPoolExecutor(2, thread_name_prefix="minipic-layout")

_DELTAS_A_TURN = 64

_WARM_CHUNK = 2048
"""Tokens of documents in one warming prompt: small enough for progress and for little rework."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready to go: tokens, sampling parameters, and how the engine handles it."""

    laid_out: LaidOutPrompt
    sampling_params: Any
    request: dict[str, Any]
    started_at: float


class BaseEngine(ABC):
    """Lays prompts out and puts answers together; a subclass runs the requests.

    Args:
        defaults: `technique`, its settings, `offsets`, `see_markers` of calls that choose nothing.

    Raises:
        ConfigurationError: a value that none of them knows.
    """

    _assembly_type: ClassVar[type[Assembly]] = Assembly

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = dict(defaults)
        self._layout_choice({})  # unknown values fail here, not after a model has loaded
        self._prefixes = RecentPrefixes()

    # ---- what a subclass provides -----------------------------------------------------------

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Turns prompts into token ids."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Aborts a request by its id; unknown and finished ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Stops serving and frees what is held. Safe to call twice."""

    @abstractmethod
    def _sampling_params(self, given: Mapping[str, Any], options: SpanOptions) -> Any:
        """What `_start` takes as the job's sampling parameters."""

    @abstractmethod
    def _start(self, job: Job) -> Handle:
        """Starts a request without waiting for anything."""

    @abstractmethod
    def _cached_tokens(self, job: Job) -> list[int] | None:
        """Cached tokens of each segment now; None where nobody can look."""

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
        return self._run([self._prepare(one, options) for one in _sequence(prompt)])

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
            handle, assembly = self._submit(await self._aprepare(prompt, options))
            for index, delta in enumerate(await handle.all_deltas()):
                if index % _DELTAS_A_TURN == 0:
                    await take_turn()
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
        handle, assembly = self._submit(await self._aprepare(prompt, options))
        async with aclosing(handle.adeltas()) as deltas:
            async for delta in deltas:
                await take_turn()
                for chunk in assembly.add(delta):
                    yield chunk

    # ---- quality ----------------------------------------------------------------------------

    def score(
        self,
        prompts: Sequence[Prompt | str],
        answers: Sequence[Sequence[int]],
        *,
        top: int = 20,
        begun: Sequence[Result] | None = None,
        **options: Any,
    ) -> list[tuple[TokenLogprobs, ...]]:
        """What would be said next at every token of the given answers (teacher forcing).

        Args:
            prompts: one for each answer.
            answers: token ids.
            top: log-probabilities at each position, at most vLLM's `max_logprobs` (20).
            begun: results of the same prompts under the same options, greedy and with
                `logprobs=top`, where they are at hand: saves running them again.
            options: of the layout, and `cache_salt`.

        Returns:
            For each answer and each of its tokens, log-probabilities by token id, of the model's
            own distribution (temperature 1).

        Raises:
            As `generate`.
        """

        def run(asked: Sequence[tuple[int, Sequence[int]]]) -> list[Result]:
            jobs = []
            for number, tokens in asked:
                left = len(answers[number]) - len(tokens)
                greedy = {"temperature": 0.0, "logprobs": top, "max_tokens": left}
                job = self._prepare(prompts[number], {**options, **greedy})
                ids = (*job.laid_out.token_ids, *tokens)
                if len(ids) >= self.max_model_len:
                    raise ContextWindowError(len(ids), self.max_model_len)
                jobs.append(replace(job, laid_out=replace(job.laid_out, token_ids=ids)))
            return self._run(jobs)

        return follow(answers, run, begun=begun)

    def compare(
        self,
        prompt: Prompt | str,
        techniques: Sequence[str] = DEFAULT_TECHNIQUES,
        *,
        max_tokens: int = 64,
    ) -> Comparison:
        """What each technique answers to one prompt, and how far it is from full attention.

        Args:
            prompt: with documents.
            techniques: as `minipic bench quality` takes them: "primed:late=2", "block_attention".
            max_tokens: of each answer, and of what is compared.

        Raises:
            As `generate`.
        """
        return compare(self, prompt, techniques, max_tokens=max_tokens)

    # ---- spans ------------------------------------------------------------------------------

    def explain(self, prompt: Prompt | str, **options: Any) -> Explanation:
        """How a prompt is laid out, and which segments the cache holds now."""
        job = self._prepare(prompt, options)
        return explain_rows(job.laid_out, self._cached_tokens(job))

    def warm(
        self,
        documents: Iterable[str] | str,
        *,
        prompt: Prompt | None = None,
        progress: bool = False,
        **options: Any,
    ) -> WarmReport:
        """Computes documents ahead of time.

        Args:
            documents: texts, or one.
            prompt: with frame "prefix", a prompt with the prefix that the documents will stand
                behind. Default: the prefixes that this engine met last; with frame "universal",
                where it met none, that of chats with a system prompt.
            progress: show a progress bar.
            options: layout options and `cache_salt`, as for `generate`.

        Raises:
            PromptError: frame "prefix", no `prompt`, and no prefix met so far; or a document that
                is no text or longer than the context.
            ConfigurationError: an option of sampling, or a technique whose prompts would not read
                what was computed ("epic_paper", "prompt_cache").
        """
        from tqdm.auto import tqdm

        started = time.perf_counter()
        sampling, layout, request = split_options(options)
        if sampling:
            raise ConfigurationError(f"warm takes no {', '.join(sorted(sampling))}")
        settings, span_options = self._layout_choice(layout)
        texts = [documents] if isinstance(documents, str) else list(documents)
        if not settings.spans:
            return WarmReport(0, 0, 0, 0.0)
        check_warmable(settings)
        prefixes: list[tuple[int, ...]]
        if settings.frame == "none":
            prefixes = [()]
        elif prompt is not None:
            prefixes = [self.layout.lay_out_prefix(prompt, settings)]
        else:
            prefixes = self._prefixes.latest(settings.frame)
            if not prefixes and settings.frame == "universal":
                prefixes = [self.layout.lay_out_prefix(None, settings)]
            if not prefixes:
                raise PromptError(
                    "With frame 'prefix' a document is computed behind the prompt's prefix, and "
                    "this engine has met none yet: pass prompt=, a prompt with that prefix"
                )
        params = self._sampling_params({"max_tokens": 1, "temperature": 0.0}, span_options)
        jobs = [
            Job(LaidOutPrompt(ids, None, ()), params, dict(request), started)
            for prefix in prefixes
            for ids in self.layout.warm_prompts(
                texts,
                prefix_token_ids=prefix,
                max_tokens=self.max_model_len - 1,
                chunk=_WARM_CHUNK,
            )
        ]
        computed = cached = 0
        for job in tqdm(jobs, desc="Warming spans", unit="prompt", disable=not progress):
            usage = self._finish(*self._submit(job)).usage
            cached += usage.cached_tokens or 0
            computed += usage.prompt_tokens - (usage.cached_tokens or 0)
        seconds = time.perf_counter() - started
        return WarmReport(len(set(texts)) * len(prefixes), computed, cached, seconds)

    # ---- tokens -----------------------------------------------------------------------------

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, with special tokens off."""
        return list(self.layout.encoder.encode(text))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, with special tokens off."""
        return len(self.token_ids(text))

    def count_prompt_tokens(self, prompt: Prompt | str, **options: Any) -> int:
        """Tokens of a prompt as it is laid out, markers and pads included, even of one that is
        too long for the context."""
        settings, span_options = self._layout_choice(split_options(options).layout)
        given = Prompt(prompt) if isinstance(prompt, str) else prompt
        return len(self.layout.lay_out(given, settings, options=span_options).token_ids)

    # ---- life -------------------------------------------------------------------------------

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

    def _layout_choice(self, chosen: Mapping[str, Any]) -> tuple[TechniqueSettings, SpanOptions]:
        """A call's technique settings and span options, over the engine's defaults.

        A technique named by the call brings its own frame, primer, late documents and the like.
        """
        return choose_layout(self._defaults, chosen)

    async def _aprepare(self, prompt: Prompt | str, options: Mapping[str, Any]) -> Job:
        """`_prepare`, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_layout_pool, self._prepare, prompt, options)

    def _prepare(self, prompt: Prompt | str, options: Mapping[str, Any]) -> Job:
        started = time.perf_counter()
        sampling, layout, request = split_options(options)
        settings, span_options = self._layout_choice(layout)
        if isinstance(prompt, str):
            prompt = Prompt(prompt)
        elif not isinstance(prompt, Prompt):
            raise PromptError(f"A prompt is a Prompt or a str, not {type(prompt).__name__}")
        laid_out = self.layout.lay_out(prompt, settings, options=span_options)
        if laid_out.num_positions >= self.max_model_len:
            raise ContextWindowError(laid_out.num_positions, self.max_model_len)
        self._prefixes.add(laid_out.prefix_token_ids, settings.frame)
        if laid_out.table is not None:
            span_options = laid_out.table.options
        return Job(laid_out, self._sampling_params(sampling, span_options), dict(request), started)

    def _run(self, jobs: Sequence[Job]) -> list[Result]:
        running = [self._submit(job) for job in jobs]
        try:
            return [self._finish(handle, assembly) for handle, assembly in running]
        except BaseException:
            for handle, _ in running:
                self.abort(handle.request_id)
            raise

    def _submit(self, job: Job) -> tuple[Handle, Assembly]:
        handle = self._start(job)
        return handle, self._assembly_type(
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


def _sequence(prompts: object) -> Sequence[Prompt | str]:
    if not isinstance(prompts, Sequence):
        raise PromptError(
            f"A prompt is a Prompt, a str, or a sequence of them, not {type(prompts).__name__}"
        )
    return prompts
