"""The one seam between integrations and engines: embedded, remote and fake look alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, overload, runtime_checkable

from minipic_backend.prompt import Prompt
from minipic_backend.quality.compare import DEFAULT_TECHNIQUES, Comparison
from minipic_backend.results import Chunk, Explanation, Result, WarmReport

__all__ = ["EngineProtocol"]


@runtime_checkable
class EngineProtocol(Protocol):
    """An engine that serves prompts with spans.

    Sampling options are vLLM's own names (`max_tokens`, `temperature`, `top_p`, `stop`, `seed`,
    `n`, `logprobs`, …). Options of the layout (`technique`, `frame`, `primer`, `late`, `blocks`,
    `budget`, `offsets`) may be given per call; so may `cache_salt`, `priority`. Unknown ones are
    refused with `ConfigurationError`. Every method may be called from any thread or event loop.
    """

    @property
    def model(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @overload
    def generate(self, prompt: Prompt | str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt | str], **options: Any) -> list[Result]: ...

    def stream(self, prompt: Prompt | str, **options: Any) -> Iterator[Chunk]: ...

    @overload
    async def agenerate(self, prompt: Prompt | str, **options: Any) -> Result: ...
    @overload
    async def agenerate(self, prompt: Sequence[Prompt | str], **options: Any) -> list[Result]: ...

    def astream(self, prompt: Prompt | str, **options: Any) -> AsyncIterator[Chunk]: ...

    def abort(self, request_id: str) -> None: ...

    def explain(self, prompt: Prompt | str, **options: Any) -> Explanation: ...

    def compare(
        self,
        prompt: Prompt | str,
        techniques: Sequence[str] = DEFAULT_TECHNIQUES,
        *,
        max_tokens: int = 64,
    ) -> Comparison: ...

    def warm(
        self,
        documents: Iterable[str],
        *,
        prompt: Prompt | None = None,
        progress: bool = False,
        **options: Any,
    ) -> WarmReport: ...

    def count_tokens(self, text: str) -> int: ...

    def count_prompt_tokens(self, prompt: Prompt | str, **options: Any) -> int: ...

    def token_ids(self, text: str) -> list[int]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
