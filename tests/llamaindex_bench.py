"""LlamaIndex over a real engine, embedded or remote: what must come from the cache does.

Each test has a `cache_salt` of its own, so that it starts with an empty cache.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

import pytest
from llama_index.core import Settings
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.minipic import (
    MiniPIC,
    SpanCondensePlusContextChatEngine,
    SpanContextChatEngine,
)
from llama_index.llms.minipic.testing import WAYS, Answer, GivenNodes, Way, ask, say
from llama_index.llms.minipic.testing.chat_engines import chat_engine

from minipic_backend import Explanation, Prompt
from minipic_backend.results import SegmentRow

__all__ = ["NODES", "ReadsNodes", "Segments", "Spy"]

_MODES = {
    "test_modes": ("compact", "tree_summarize", "simple_summarize"),
    "test_modes_with_a_prompt_for_each_node": ("refine", "accumulate"),
    "test_compact_accumulate": ("compact_accumulate",),
    "test_chat_engines": ("context", "condense_plus_context", "condense_question", "best"),
}

NODES = [
    NodeWithScore(
        node=TextNode(
            text=f"The {colour} box holds {thing}. It stands in room {room}, on the shelf by the "
            "window, and nobody but the caretaker has a key to that room.",
            id_=colour,
            metadata={"title": f"The {colour} box", "page": room},
        ),
        score=score,
    )
    for colour, thing, room, score in (
        ("red", "coins", 11, 0.9),
        ("blue", "letters", 12, 0.7),
        ("green", "seeds", 13, 0.5),
        ("white", "maps", 14, 0.3),
    )
]
RED, BLUE, GREEN, WHITE = NODES
FIRST, SECOND = "Where is the red box?", "What does the blue box hold?"


class Spy:
    """Passes everything on to `engine`.

    Attributes:
        explanations: of the requests, in order, as they were laid out.
        results: of the requests that were neither streamed nor asynchronous.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.explanations: list[Explanation] = []
        self.results: list[Any] = []

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
        result = self._engine.generate(prompt, **options)
        self.results.append(result)
        return result

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

    def count_prompt_tokens(self, prompt: Any, **options: Any) -> int:
        return int(self._engine.count_prompt_tokens(prompt, **options))

    def token_ids(self, text: str) -> list[int]:
        return list(self._engine.token_ids(text))

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *args: Any) -> None:
        self.close()

    def _note(self, prompt: Prompt, options: dict[str, Any]) -> None:
        names = ("technique", "frame", "primer", "late", "cache_salt")
        given = {name: options[name] for name in names if name in options}
        self.explanations.append(self._engine.explain(prompt, **given))


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


class ReadsNodes:
    """A second question over overlapping nodes in another order reads every shared node that is
    a span from the cache, and is answered as with an empty cache.

    Subclass it and give it a fixture `engine`, of the scope of a module or more.

    Attributes:
        ways: how to ask.
    """

    ways: ClassVar[tuple[Way, ...]] = WAYS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        modes = _MODES.get(metafunc.function.__name__, ())
        cases = [
            (mode, way)
            for mode in modes
            for way in self.ways
            if "accumulate" not in mode or way in ("sync", "async")  # these never stream
        ]
        if modes:
            metafunc.parametrize(("mode", "way"), cases)

    @pytest.fixture
    def spy(self, engine: Any) -> Spy:
        return Spy(engine)

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls) -> dict[str, str]:
        """Answers with an empty cache, by mode."""
        return {}

    @pytest.fixture
    def new_llm(self, spy: Spy) -> Callable[[], MiniPIC]:
        """Makes models that share no cache."""
        return lambda: MiniPIC(engine=spy, temperature=0, max_tokens=4, cache_salt=uuid.uuid4().hex)

    def test_modes(self, new_llm: Any, spy: Spy, alone: Any, mode: str, way: Way) -> None:
        # The best node is late. The new one is the best of the others, and so stands behind them:
        # what follows a miss is not read.
        first, second = [RED, GREEN, WHITE], [GREEN, RED, WHITE, BLUE]
        cached = self.compare(new_llm, spy, alone, mode, _asking(mode, way, first, second))
        assert len(cached) == 1

    def test_modes_with_a_prompt_for_each_node(
        self, new_llm: Any, spy: Spy, alone: Any, mode: str, way: Way
    ) -> None:
        """Alone in its prompt, no node is late. Refining has a prefix of its own."""
        first = [RED, BLUE, GREEN] if mode == "refine" else [RED, BLUE]
        second = [RED, GREEN] if mode == "refine" else [BLUE, RED]
        cached = self.compare(new_llm, spy, alone, mode, _asking(mode, way, first, second))
        assert len(cached) == 2
        assert all(cached)

    def test_compact_accumulate(
        self, new_llm: Any, spy: Spy, alone: Any, mode: str, way: Way
    ) -> None:
        first, second = [RED, GREEN, WHITE], [GREEN, RED, WHITE, BLUE]
        self.compare(new_llm, spy, alone, mode, _asking(mode, way, first, second))

    def test_chat_engines(self, new_llm: Any, spy: Spy, alone: Any, mode: str, way: Way) -> None:
        first, second = [RED, GREEN, WHITE], [GREEN, RED, WHITE, BLUE]

        def talking(llm: MiniPIC, nodes: Sequence[NodeWithScore], question: str) -> Answer:
            streaming = way in ("stream", "astream")
            return say(chat_engine(mode, llm, nodes, streaming=streaming), question, way)

        self.compare(
            new_llm,
            spy,
            alone,
            mode,
            (
                lambda llm: talking(llm, first, FIRST),
                lambda llm: talking(llm, second, SECOND),
            ),
        )

    @pytest.mark.parametrize("kind", [SpanContextChatEngine, SpanCondensePlusContextChatEngine])
    def test_later_turns_of_a_chat(self, new_llm: Any, spy: Spy, kind: Any) -> None:
        """Nodes stand in front of the history: they are read there on every turn, and what was said
        behind them, too, since equal scores put them into the same order."""
        llm, segments = new_llm(), Segments()
        retriever = GivenNodes([RED, BLUE, GREEN, WHITE])
        chat = kind.from_defaults(retriever=retriever, llm=llm, system_prompt="Be brief.")
        chat.chat(FIRST)
        before = spy.explanations[-1]
        segments.add(before)
        for nodes in ([GREEN, BLUE, RED, WHITE], [WHITE, RED, BLUE, GREEN]):  # RED is late
            retriever.nodes = nodes
            say(chat, SECOND, "sync")
            explanation = spy.explanations[-1]
            kinds = [row.kind for row in explanation.rows]
            assert kinds == ["prefix", "span", "span", "span", "dependent"]
            expected = segments.expected(explanation)
            assert expected == sum(row.num_tokens for row in explanation.rows[:-1])
            pairs = zip(explanation.token_ids, before.token_ids, strict=False)
            said = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            answer = llm.calls[-2].usage.completion_tokens
            cached, size = llm.calls[-1].usage.cached_tokens or 0, spy.block_size
            assert expected < said // size * size <= cached <= said + answer
            before = explanation

    def test_without_nodes(self, new_llm: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was said before is an ordinary prefix: read up to its last whole block."""
        llm = new_llm()
        monkeypatch.setattr(Settings, "_llm", llm)  # no_text wants one, and never asks it
        block_size = spy.block_size

        def cached() -> int:
            return llm.calls[-1].usage.cached_tokens or 0

        for mode in ("no_text", "context_only"):
            ask(_query_engine(llm, mode, "sync", NODES), FIRST, "sync")
        assert not llm.calls
        generation = _query_engine(llm, "generation", "sync", NODES)
        for _ in range(2):
            ask(generation, FIRST * 4, "sync")
        prompt = spy.explanations[-1].token_ids
        assert cached() == (len(prompt) - 1) // block_size * block_size > 0

        chat = chat_engine("simple", llm)
        said: tuple[int, ...] = ()
        for message in (FIRST * 2, SECOND * 2, FIRST):
            say(chat, message, "sync")
            prompt = spy.explanations[-1].token_ids
            same = [a == b for a, b in zip(said, prompt, strict=False)]
            common = same.index(False) if False in same else len(same)
            assert cached() == common // block_size * block_size
            # The last token of an answer was never computed.
            said = (*prompt, *spy.results[-1].completions[0].token_ids[:-1])
        assert cached() > 0

    def compare(
        self,
        new_llm: Callable[[], MiniPIC],
        spy: Spy,
        alone: dict[str, str],
        mode: str,
        ask_both: tuple[Callable[[MiniPIC], Answer], Callable[[MiniPIC], Answer]],
    ) -> list[int]:
        """Tokens that each request of the second question read from the cache."""
        first, second = ask_both
        if mode not in alone:  # the same for every way to ask
            alone[mode] = second(new_llm()).text
        llm, segments = new_llm(), Segments()
        before = len(spy.explanations)
        first(llm)
        for explanation in spy.explanations[before:]:
            segments.add(explanation)
        answer, cached = run(llm, spy, second, segments)
        assert sum(cached) > 0
        assert answer.text == alone[mode]
        assert answer.text.strip()
        return cached


def run(
    llm: MiniPIC, spy: Spy, ask_it: Callable[[MiniPIC], Answer], segments: Segments
) -> tuple[Answer, list[int]]:
    """An answer, and the tokens that each request read from the cache: just those expected."""
    before = len(spy.explanations)
    with llm.record() as calls:
        answer = ask_it(llm)
    asked = spy.explanations[before:]
    usages = sorted((c.usage.prompt_tokens, c.usage.cached_tokens or 0) for c in calls)
    expected = []
    for explanation in asked:
        expected.append((len(explanation.token_ids), segments.expected(explanation)))
        segments.add(explanation)
    assert usages == sorted(expected)
    return answer, [cached for _, cached in usages]


def _asking(
    mode: str, way: Way, first: Sequence[NodeWithScore], second: Sequence[NodeWithScore]
) -> tuple[Callable[[MiniPIC], Answer], Callable[[MiniPIC], Answer]]:
    def asking(nodes: Sequence[NodeWithScore], question: str) -> Callable[[MiniPIC], Answer]:
        return lambda llm: ask(_query_engine(llm, mode, way, nodes), question, way)

    return asking(first, FIRST), asking(second, SECOND)


def _query_engine(
    llm: MiniPIC, mode: str, way: Way, nodes: Sequence[NodeWithScore]
) -> RetrieverQueryEngine:
    synthesizer = get_response_synthesizer(
        llm=llm,
        prompt_helper=llm.prompt_helper,
        response_mode=ResponseMode(mode),
        streaming=way in ("stream", "astream"),
    )
    return RetrieverQueryEngine(GivenNodes(nodes), response_synthesizer=synthesizer)
