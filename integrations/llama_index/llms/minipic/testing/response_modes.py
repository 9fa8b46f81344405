"""Query engines in every response mode."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from llama_index.core import Settings
from llama_index.core.llms import LLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.llms.minipic.testing.prompts_seen import PromptsSeen
from llama_index.llms.minipic.testing.retrieving import HOSTILE_NODES, NODES, GivenNodes
from llama_index.llms.minipic.testing.ways import WAYS, Answer, Way, ask

__all__ = ["ResponseModeTests"]

QUESTION = "What does the blue box hold? Write {context_str} and {query_str} behind it."

# Modes that ask the model with nodes in the prompt; the others use no nodes or no model.
WITH_NODES = (
    "compact",
    "refine",
    "tree_summarize",
    "simple_summarize",
    "accumulate",
    "compact_accumulate",
)
MODES = tuple(mode.value for mode in ResponseMode)
NEVER_STREAM = ("accumulate", "compact_accumulate")  # LlamaIndex refuses
WITHOUT_MODEL = ("no_text", "context_only")


def _cases(modes: Sequence[str]) -> list[tuple[str, Way]]:
    """Each mode in each way that LlamaIndex has for it."""
    return [
        (mode, way)
        for mode in modes
        for way in WAYS
        if mode not in NEVER_STREAM or way in ("sync", "async")
    ]


class ResponseModeTests:
    """Subclass it and give it an `llm` fixture.

    Attributes:
        prompt_helper: for the synthesizers; None: LlamaIndex's choice.
    """

    prompt_helper: ClassVar[Any] = None

    @pytest.fixture
    def llm(self) -> LLM:
        raise NotImplementedError("Give the model under test as a fixture `llm`")

    @pytest.fixture(autouse=True)
    def _as_default(self, llm: LLM) -> Iterator[None]:
        """`no_text` takes the global model whatever it is given."""
        before = Settings._llm
        Settings._llm = llm
        yield
        Settings._llm = before

    def query_engine(
        self, llm: LLM, mode: str, way: Way, nodes: Sequence[NodeWithScore] = NODES
    ) -> RetrieverQueryEngine:
        """A query engine; nothing but arguments, no global settings."""
        synthesizer = get_response_synthesizer(
            llm=llm,
            prompt_helper=self.prompt_helper,
            response_mode=ResponseMode(mode),
            streaming=way in ("stream", "astream"),
            use_async=way == "async",
        )
        return RetrieverQueryEngine(GivenNodes(nodes), response_synthesizer=synthesizer)

    def ask(
        self, llm: LLM, mode: str, way: Way, nodes: Sequence[NodeWithScore] = NODES
    ) -> tuple[Answer, PromptsSeen]:
        """One question, and the prompts that came of it."""
        with PromptsSeen() as seen:
            answer = ask(self.query_engine(llm, mode, way, nodes), QUESTION, way)
        return answer, seen

    @pytest.mark.parametrize(("mode", "way"), _cases(MODES))
    def test_answers(self, llm: LLM, mode: str, way: Way) -> None:
        answer, seen = self.ask(llm, mode, way)
        assert bool(seen.prompts) == (mode not in WITHOUT_MODEL)
        if mode != "no_text":
            assert answer.text.strip()
        if mode in WITH_NODES and way in ("stream", "astream"):
            assert answer.pieces

    @pytest.mark.parametrize(("mode", "way"), _cases(WITH_NODES))
    def test_every_node_reaches_the_model_as_it_is(self, llm: LLM, mode: str, way: Way) -> None:
        for nodes in (NODES, HOSTILE_NODES):
            _, seen = self.ask(llm, mode, way, nodes)
            for node in nodes:
                text = node.node.get_content(metadata_mode=MetadataMode.LLM)
                assert sum(text in prompt for prompt in seen.prompts) == 1, text

    @pytest.mark.parametrize(("mode", "way"), _cases(WITH_NODES))
    def test_the_question_is_not_a_template(self, llm: LLM, mode: str, way: Way) -> None:
        _, seen = self.ask(llm, mode, way)
        assert all(QUESTION in prompt for prompt in seen.prompts)

    @pytest.mark.parametrize(("mode", "way"), _cases(WITH_NODES))
    def test_no_list_is_printed_as_code(self, llm: LLM, mode: str, way: Way) -> None:
        """simple_summarize formats a list's repr, and with it line breaks as `\\n`."""
        _, seen = self.ask(llm, mode, way)
        assert not any("['" in prompt or "\\n" in prompt for prompt in seen.prompts)

    @pytest.mark.parametrize(
        ("mode", "way"), _cases([mode for mode in MODES if mode != "generation"])
    )
    def test_source_nodes_are_untouched(self, llm: LLM, mode: str, way: Way) -> None:
        given = copy.deepcopy(NODES)
        answer, _ = self.ask(llm, mode, way, given)
        assert answer.response.source_nodes == list(NODES)
        assert all(
            a.node is b.node for a, b in zip(answer.response.source_nodes, given, strict=True)
        )

    @pytest.mark.parametrize("mode", WITH_NODES)
    def test_many_at_once_in_one_event_loop(self, llm: LLM, mode: str) -> None:
        engine = self.query_engine(llm, mode, "async")

        async def main() -> list[Any]:
            return await asyncio.gather(*(engine.aquery(QUESTION) for _ in range(8)))

        assert all(str(response).strip() for response in asyncio.run(main()))

    def test_a_second_event_loop(self, llm: LLM) -> None:
        engine = self.query_engine(llm, "compact", "async")
        for _ in range(2):
            assert str(asyncio.run(engine.aquery(QUESTION))).strip()

    def test_no_nodes(self, llm: LLM) -> None:
        answer, seen = self.ask(llm, "compact", "sync", [])
        assert answer.text == "Empty Response"
        assert not seen.prompts
