"""LlamaIndex on the real model: every mode and chat engine reads the nodes that it has met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.minipic import MiniPIC
from llama_index.llms.minipic.testing import WAYS, Answer, GivenNodes, Way, ask
from spy import Segments, Spy

MODES = ("compact", "refine", "tree_summarize", "simple_summarize")
MODES_WITHOUT_STREAMS = ("accumulate", "compact_accumulate")
CHAT_MODES = ("context", "condense_plus_context", "condense_question")

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
FIRST = [RED, BLUE, GREEN]
# Another order, and one that is new, last: what stands behind a miss is not read.
SECOND = [GREEN, RED, BLUE, WHITE]


@pytest.fixture(scope="module")
def spy(exact_rig: Any) -> Spy:
    return Spy(exact_rig.engine)


@pytest.fixture(scope="module")
def llm(spy: Spy) -> MiniPIC:
    return MiniPIC(engine=spy, temperature=0, max_tokens=6)


@dataclass
class Bench:
    """Asks, and knows what must have come from the cache."""

    llm: MiniPIC
    spy: Spy
    reset: Callable[[], None]

    def run(self, ask_it: Callable[[], Answer], segments: Segments) -> tuple[Answer, list[int]]:
        """An answer and the tokens read from the cache, which are just those expected."""
        first = len(self.spy.explanations)
        with self.llm.record() as calls:
            answer = ask_it()
        asked = self.spy.explanations[first:]
        assert len(asked) == len(calls)
        cached = [call.usage.cached_tokens or 0 for call in calls]
        for explanation, record in zip(asked, calls, strict=True):
            assert record.usage.prompt_tokens == len(explanation.token_ids)
            assert record.usage.cached_tokens == segments.expected(explanation)
            segments.add(explanation)
        return answer, cached

    def compare(
        self, cold: Callable[[], Answer], first: Callable[[], Answer], second: Callable[[], Answer]
    ) -> None:
        """`second` after `first` reads all that they share, and answers as `cold`, alone."""
        self.reset()
        alone, _ = self.run(cold, Segments())
        self.reset()
        segments = Segments()
        self.run(first, segments)
        answer, cached = self.run(second, segments)
        assert sum(cached) > 0
        assert answer.text == alone.text


@pytest.fixture(scope="module")
def bench(llm: MiniPIC, spy: Spy, exact_rig: Any) -> Bench:
    return Bench(llm, spy, exact_rig.reset)


def query_engine(
    llm: MiniPIC, mode: str, way: Way, nodes: Sequence[NodeWithScore], **kwargs: Any
) -> RetrieverQueryEngine:
    synthesizer = get_response_synthesizer(
        llm=llm,
        prompt_helper=llm.prompt_helper,
        response_mode=ResponseMode(mode),
        streaming=way in ("stream", "astream"),
        **kwargs,
    )
    return RetrieverQueryEngine(GivenNodes(nodes), response_synthesizer=synthesizer)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_modes(bench: Bench, mode: str, way: Way) -> None:
    def asking(nodes: Sequence[NodeWithScore], question: str) -> Callable[[], Answer]:
        return lambda: ask(query_engine(bench.llm, mode, way, nodes), question, way)

    second = asking(SECOND, "What does the blue box hold?")
    bench.compare(second, asking(FIRST, "Where is the red box?"), second)
