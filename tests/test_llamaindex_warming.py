"""Nodes computed ahead of time: by hand, and at ingestion."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    MockEmbedding,
    PromptTemplate,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import TextNode
from llama_index.llms.minipic import MiniPIC, SpanWarmer, span_blocks
from llama_index.llms.minipic.testing import NODES, GivenNodes
from llama_index.llms.minipic.testing.chat_engines import chat_engine

from minipic_backend import PromptError
from minipic_backend.testing import FakeEngine

DOCUMENTS = [
    Document(text=node.node.get_content(), metadata={"z": place, "a": "x"})
    for place, node in enumerate(NODES)
]


@pytest.fixture
def llm() -> MiniPIC:
    return MiniPIC(engine=FakeEngine("Yes."), late=0)


def cached(llm: MiniPIC, ask: Any) -> tuple[int, int]:
    """Tokens read from the cache, and tokens that were put there."""
    with llm.record() as calls:
        ask()
    usage = calls[-1].usage
    return usage.cached_tokens or 0, usage.cache_creation_tokens or 0


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "simple_summarize", "accumulate"])
def test_query_engines(llm: MiniPIC, mode: str) -> None:
    engine = RetrieverQueryEngine.from_args(GivenNodes(), llm=llm, response_mode=ResponseMode(mode))
    report = llm.warm(NODES, engine)
    assert report.num_cached_tokens == 0
    read, made = cached(llm, lambda: engine.query("Which?"))
    assert read > 0
    prefix = llm.explain(llm.engine.prompts[-1]).rows[0].num_tokens  # type: ignore[union-attr]
    assert made <= prefix  # a fake engine warms spans alone


@pytest.mark.parametrize("mode", ["context", "condense_plus_context", "condense_question"])
def test_chat_engines(llm: MiniPIC, mode: str) -> None:
    chat = chat_engine(mode, llm)
    llm.warm(NODES, chat)
    read, _ = cached(llm, lambda: chat.chat("Which?"))
    assert read > 0
    assert llm.warm(NODES, chat).num_computed_tokens == 0


def test_templates_messages_and_lists_of_them(llm: MiniPIC) -> None:
    message = ChatMessage(blocks=[TextBlock(text="Use:\n"), *span_blocks("x"), TextBlock(text="Q")])
    frames: list[Any] = [
        "Use:\n{context_str}\nQ: {query_str}",
        PromptTemplate("See:\n{context_str}\nQ: {query_str}"),
        RichPromptTemplate("Read:\n{{ context_str }}\nQ: {{ query_str }}"),
        get_response_synthesizer(llm=llm, response_mode=ResponseMode.TREE_SUMMARIZE),
    ]
    for frame in frames:
        report = llm.warm(NODES, frame)
        assert (report.num_spans, report.num_cached_tokens) == (len(NODES), 0)
    together = llm.warm(NODES, frames)
    assert (together.num_spans, together.num_computed_tokens) == (len(frames) * len(NODES), 0)
    assert llm.warm(["Plain text."], [message]).num_spans == 1
    assert asyncio.run(llm.awarm(NODES, frames[0])).num_computed_tokens == 0


def test_the_default_is_the_template_of_query_engines(llm: MiniPIC) -> None:
    llm.warm(NODES)
    engine = RetrieverQueryEngine.from_args(GivenNodes(NODES[::-1]), llm=llm)
    assert cached(llm, lambda: engine.query("Which?"))[0] > 0


def test_no_place_for_nodes(llm: MiniPIC) -> None:
    with pytest.raises(PromptError, match="context_str"):
        llm.warm(NODES, "Q: {query_str}")
    with pytest.raises(PromptError, match="SimpleChatEngine"):
        llm.warm(NODES, chat_engine("simple", llm))
    with pytest.raises(PromptError, match="int"):
        llm.warm([1])  # type: ignore[list-item]


def test_one_node_or_text(llm: MiniPIC) -> None:
    """A node and a text are iterable themselves."""
    assert llm.warm("A text.").num_spans == 1
    assert llm.warm(TextNode(text="A text.")).num_computed_tokens == 0
    assert llm.warm(NODES[0]).num_spans == 1
    index = SummaryIndex([])
    with pytest.raises(PromptError, match=r"SummaryIndex.*docstore"):
        llm.warm(index)  # type: ignore[arg-type]


def test_ingestion(llm: MiniPIC, capsys: pytest.CaptureFixture[str]) -> None:
    warmer = SpanWarmer(llm=llm)
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), MockEmbedding(embed_dim=3), warmer]
    )
    nodes = pipeline.run(documents=DOCUMENTS)
    assert [node.metadata for node in nodes] == [document.metadata for document in DOCUMENTS]
    assert llm.warm(nodes).num_computed_tokens == 0
    asyncio.run(pipeline.arun(documents=DOCUMENTS))
    again = SpanWarmer(llm=llm)
    assert again.to_dict() != warmer.to_dict()  # nor does a pipeline's cache take them for equal


def test_a_store_gives_back_the_same_spans(llm: MiniPIC, tmp_path: Path) -> None:
    embedding = MockEmbedding(embed_dim=3)
    index = VectorStoreIndex.from_documents(DOCUMENTS, embed_model=embedding)
    llm.warm(index.docstore.docs.values())
    index.storage_context.persist(str(tmp_path))
    loaded = load_index_from_storage(
        StorageContext.from_defaults(persist_dir=str(tmp_path)), embed_model=embedding
    )
    assert llm.warm(loaded.docstore.docs.values()).num_computed_tokens == 0
    engine = loaded.as_query_engine(llm=llm, similarity_top_k=2)
    read, made = cached(llm, lambda: engine.query("Which?"))
    rows = llm.explain(llm.engine.prompts[-1]).rows  # type: ignore[union-attr]
    assert [row.kind for row in rows] == ["prefix", "span", "span", "dependent"]
    assert read == rows[1].num_tokens + rows[2].num_tokens
    assert made == rows[0].num_tokens  # a fake engine warms spans alone
