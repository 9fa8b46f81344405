"""An engine that notes down what it is asked, and what it should find in its cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from minipic_backend import Explanation, Prompt
from minipic_backend.results import SegmentRow

__all__ = ["Segments", "Spy"]


class Spy:
    """Passes everything on to `engine`.

    Attributes:
        explanations: of the requests, in order, as they were laid out.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.explanations: list[Explanation] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # What a protocol that is checked at run time looks for on the class.

    @property
    def model(self) -> str:
        return str(self._engine.model)

    @property
    def max_model_len(self) -> int:
        return int(self._engine.max_model_len)

    def generate(self, prompt: Any, **options: Any) -> Any:
        self._note(prompt, options)
        return self._engine.generate(prompt, **options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[Any]:
        self._note(prompt, options)
        return self._engine.stream(prompt, **options)  # type: ignore[no-any-return]

    async def agenerate(self, prompt: Any, **options: Any) -> Any:
        self._note(prompt, options)
        return await self._engine.agenerate(prompt, **options)

    def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Any]:
        self._note(prompt, options)
        return self._engine.astream(prompt, **options)  # type: ignore[no-any-return]

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def explain(self, prompt: Any, **options: Any) -> Any:
        return self._engine.explain(prompt, **options)

    def warm(self, documents: Any, **options: Any) -> Any:
        return self._engine.warm(documents, **options)

    def count_tokens(self, text: str) -> int:
        return int(self._engine.count_tokens(text))

    def token_ids(self, text: str) -> list[int]:
        return list(self._engine.token_ids(text))

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *args: Any) -> None:
        self.close()

    def _note(self, prompt: Prompt, options: dict[str, Any]) -> None:
        layout = {k: options[k] for k in ("technique", "frame", "primer", "late") if k in options}
        self.explanations.append(self._engine.explain(prompt, **layout))


Key = tuple[tuple[int, ...], ...]


@dataclass
class Segments:
    """Prefixes, and spans behind them, that requests have left in the cache."""

    known: set[Key] = field(default_factory=set)

    def add(self, explanation: Explanation) -> None:
        self.known.update(key for key, row in _keys(explanation) if row.kind != "dependent")

    def expected(self, explanation: Explanation) -> int:
        """Tokens that this prompt must read from the cache: of every prefix and span that was
        there before. Those must come in front of all others."""
        hits = [key in self.known for key, _ in _keys(explanation)]
        first_miss = hits.index(False)
        assert not any(hits[first_miss:]), "a test whose prompts cannot all be hit"
        return sum(row.num_tokens for row in explanation.rows[:first_miss])


def _keys(explanation: Explanation) -> Iterator[tuple[Key, SegmentRow]]:
    """Each segment's tokens, a span's behind those of its frame."""
    start = 0
    prefix: tuple[int, ...] = ()
    for row in explanation.rows:
        ids = explanation.token_ids[start : start + row.num_tokens]
        start += row.num_tokens
        if row.kind == "prefix":
            prefix = ids
        yield ((prefix, ids) if row.kind == "span" else (ids,)), row
