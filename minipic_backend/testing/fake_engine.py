"""An engine in plain Python, with the manners of the real one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, overload

from minipic_backend.errors import ConfigurationError, ContextWindowError
from minipic_backend.prompt import Prompt, Span
from minipic_backend.quality.compare import DEFAULT_TECHNIQUES, Comparison, TechniqueAnswer
from minipic_backend.quality.techniques import parse_technique
from minipic_backend.results import (
    Chunk,
    Explanation,
    Result,
    SegmentRow,
    Timing,
    Usage,
    WarmReport,
)
from minipic_backend.sampling import split_options
from minipic_backend.testing._answers import Answers, Script, chunks_of
from minipic_backend.testing._layout import FakeLayout, FakeSegment, split_tokens, token_id
from minipic_backend.testing._requests import FakeCall, RequestLog, Running

__all__ = ["FakeEngine"]


class FakeEngine:
    """Implements `EngineProtocol` without torch or vLLM, deterministically.

    A prefix or span that was seen before (in the same frame, with the same `cache_salt`) counts
    as read from the cache; other text never does. A token is a word with the whitespace before it.

    Args:
        answers: what it answers: one string; a sequence, taken in turn and over again; or a
            function of the prompt, which may also raise.
        max_model_len: tokens of prompt and answer together.
        ttft_s: seconds of work before the first token.
        token_s: seconds of work per further token of a stream.
        gather: answer nobody before this many requests have run at once: shows that a caller
            really asks concurrently, however slow the machine. Gives up after half a minute.
        technique, frame, primer, see_primer, best_last, late, blocks, budget: defaults, as an
            engine has them.
    """

    def __init__(
        self,
        answers: Answers = "A fake answer.",
        *,
        model: str = "fake-model",
        max_model_len: int = 4096,
        block_size: int = 16,
        ttft_s: float = 0.0,
        token_s: float = 0.0,
        gather: int = 0,
        technique: str = "primed",
        frame: str | None = None,
        primer: Any = None,
        see_primer: bool | None = None,
        best_last: bool | None = None,
        late: int | None = None,
        blocks: int | None = None,
        budget: float | None = None,
    ) -> None:
        self._script = Script(answers)
        self._block_size = block_size
        self._model = model
        self._max_model_len = max_model_len
        self._ttft_s = ttft_s
        self._token_s = token_s
        self._layout = FakeLayout(
            block_size,
            technique=technique,
            frame=frame,
            primer=primer,
            see_primer=see_primer,
            best_last=best_last,
            late=late,
            blocks=blocks,
            budget=budget,
        )
        self._log = RequestLog(gather)
        self._cache: set[Any] = set()
        self._cache_lock = threading.Lock()

    @property
    def model(self) -> str:
        return self._model

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def calls(self) -> list[FakeCall]:
        """Every request, in the order of arrival."""
        return self._log.calls

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of `calls`."""
        return [call.prompt for call in self._log.calls]

    @property
    def aborted(self) -> list[str]:
        """Ids of requests that ended early: an error, an abort, a cancel, a stream left."""
        return self._log.aborted

    @property
    def max_concurrency(self) -> int:
        """The most requests that ever ran at once."""
        return self._log.max_concurrency

    @property
    def closed(self) -> bool:
        return self._log.closed

    @overload
    def generate(self, prompt: Prompt | str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt | str], **options: Any) -> list[Result]: ...

    def generate(
        self, prompt: Prompt | str | Sequence[Prompt | str], **options: Any
    ) -> Result | list[Result]:
        if not isinstance(prompt, Prompt | str):
            each = _options_of_each(len(prompt), options)
            with ThreadPoolExecutor(max(1, len(prompt))) as pool:
                return list(pool.map(lambda p, o: self.generate(p, **o), prompt, each))
        with self._run(prompt, options) as running:
            running.wait(self._ttft_s)
            return self._finish(running)

    @overload
    async def agenerate(self, prompt: Prompt | str, **options: Any) -> Result: ...
    @overload
    async def agenerate(self, prompt: Sequence[Prompt | str], **options: Any) -> list[Result]: ...

    async def agenerate(
        self, prompt: Prompt | str | Sequence[Prompt | str], **options: Any
    ) -> Result | list[Result]:
        if not isinstance(prompt, Prompt | str):
            each = zip(prompt, _options_of_each(len(prompt), options), strict=True)
            return list(await asyncio.gather(*(self.agenerate(p, **o) for p, o in each)))
        with self._run(prompt, options) as running:
            await running.await_(self._ttft_s)
            return self._finish(running)

    def stream(self, prompt: Prompt | str, **options: Any) -> Iterator[Chunk]:
        with self._run(prompt, options) as running:
            running.wait(self._ttft_s)
            for chunk in chunks_of(self._finish(running)):
                self._log.check(running)
                yield chunk
                running.wait(self._token_s)

    async def astream(self, prompt: Prompt | str, **options: Any) -> AsyncIterator[Chunk]:
        with self._run(prompt, options) as running:
            await running.await_(self._ttft_s)
            for chunk in chunks_of(self._finish(running)):
                self._log.check(running)
                yield chunk
                await running.await_(self._token_s)

    def abort(self, request_id: str) -> None:
        self._log.abort(request_id)

    def explain(self, prompt: Prompt | str, **options: Any) -> Explanation:
        self._log.check_open()
        rows: list[SegmentRow] = []
        offset = 0
        segments = self._layout.segments(_as_prompt(prompt), options)
        for index, segment in enumerate(segments):
            rows.append(
                SegmentRow(
                    index=index,
                    kind=segment.kind,
                    label=segment.label,
                    num_tokens=segment.num_tokens,
                    num_pads=segment.num_pads,
                    offset=offset,
                    cached_tokens=segment.num_tokens if segment.key in self._cache else 0,
                    preview=" ".join(segment.text.split())[:40],
                )
            )
            offset += segment.num_tokens - (segment.num_pads if segment.kind == "span" else 0)
        ids = tuple(token for segment in segments for token in segment.token_ids)
        return Explanation(tuple(rows), ids, ("laid out by a fake engine",))

    def compare(
        self,
        prompt: Prompt | str,
        techniques: Sequence[str] = DEFAULT_TECHNIQUES,
        *,
        max_tokens: int = 64,
    ) -> Comparison:
        """Answers as `generate` does; knows no probabilities, so that nothing diverges."""
        full = self.generate(prompt, technique="full", max_tokens=max_tokens)
        answers = []
        for spec in map(parse_technique, techniques):
            result = self.generate(prompt, **spec.options, max_tokens=max_tokens)
            usage = result.usage
            answers.append(
                TechniqueAnswer(
                    technique=spec.label,
                    text=result.text,
                    same_text=result.text == full.text,
                    divergence=0.0,
                    worst_divergence=0.0,
                    agreement=1.0,
                    num_prompt_tokens=usage.prompt_tokens,
                    num_cached_tokens=usage.cached_tokens,
                )
            )
        return Comparison(tuple(answers))

    def warm(
        self,
        documents: Iterable[str] | str,
        *,
        prompt: Prompt | None = None,
        progress: bool = False,
        **options: Any,
    ) -> WarmReport:
        self._log.check_open()
        started = time.perf_counter()
        given = [documents] if isinstance(documents, str) else documents
        texts = list(dict.fromkeys(Span(document).text for document in given))
        sampling, _, _ = split_options(options)
        if sampling:
            raise ConfigurationError(f"warm takes no {', '.join(sorted(sampling))}")
        spans = self._layout.spans(texts, prompt, options)
        read, made = self._look_up(spans)
        seconds = time.perf_counter() - started
        return WarmReport(len(spans), made, read, seconds)

    def reset_cache(self) -> None:
        """Forget every prefix and span."""
        with self._cache_lock:
            self._cache.clear()

    def count_tokens(self, text: str) -> int:
        return len(self.token_ids(text))

    def count_prompt_tokens(self, prompt: Prompt | str, **options: Any) -> int:
        segments = self._layout.segments(_as_prompt(prompt), options)
        return sum(segment.num_tokens for segment in segments)

    def token_ids(self, text: str) -> list[int]:
        self._log.check_open()
        return [token_id(token) for token in split_tokens(text)]

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self, prompt: Prompt | str, options: Mapping[str, Any]
    ) -> AbstractContextManager[Running]:
        self._log.check_open()
        prompt = _as_prompt(prompt)
        segments = self._layout.segments(prompt, options)
        num_tokens = sum(segment.num_tokens for segment in segments)
        if num_tokens >= self._max_model_len:
            raise ContextWindowError(num_tokens, self._max_model_len)
        self._layout.remember(segments, options)
        return self._log.run(prompt, segments, options)

    def _finish(self, running: Running) -> Result:
        self._log.check(running)
        call, segments = running.call, running.segments
        sampling = split_options(call.options).sampling
        num_prompt = sum(segment.num_tokens for segment in segments)
        limit = sampling.get("max_tokens") or self._max_model_len - num_prompt
        completions = self._script.complete(call.prompt, limit, sampling)
        read, made = self._look_up(segments)
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=sum(len(completion.token_ids) for completion in completions),
            cached_tokens=read,
            cache_creation_tokens=made,
            pad_tokens=sum(segment.num_pads for segment in segments),
        )
        elapsed = time.perf_counter() - running.started
        return Result(call.request_id, completions, usage, Timing(elapsed, elapsed))

    def _look_up(self, segments: Sequence[FakeSegment]) -> tuple[int, int]:
        """Tokens read from the cache, and tokens added to it."""
        read = made = 0
        with self._cache_lock:
            for segment in segments:
                if segment.key in self._cache:
                    read += segment.num_tokens
                elif segment.key is not None:
                    made += segment.num_tokens
                    self._cache.add(segment.key)
        return read, made


def _as_prompt(prompt: Prompt | str) -> Prompt:
    return prompt if isinstance(prompt, Prompt) else Prompt(prompt)


def _options_of_each(number: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A list of prompts shares its options, but every request needs an id of its own."""
    if options.get("request_id") is None:
        return [options] * number
    return [{**options, "request_id": f"{options['request_id']}-{i}"} for i in range(number)]
