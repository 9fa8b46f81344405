"""Retrieval that warms, and indexing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate, WarmingRetriever, index_and_warm
from langchain_suites import RetrieverSuite
from langchain_support import ANSWER, DOCUMENTS, Retriever

from minipic_backend import ConfigurationError, PromptError
from minipic_backend.testing import FakeEngine

PROMPT = SpanPromptTemplate.from_messages(
    [("system", "Answer from the documents."), ("human", "{context}\n\n{question}")]
)


def vectors() -> InMemoryVectorStore:
    return InMemoryVectorStore(DeterministicFakeEmbedding(size=8))


@pytest.fixture
def llm() -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=FakeEngine(ANSWER))


def states(llm: ChatMiniPIC, documents: list[Document]) -> list[str]:
    value = PROMPT.invoke({"context": documents, "question": "?"})
    return [row.state for row in llm.explain(value, late=0).rows if row.kind == "span"]


class TestRetriever(RetrieverSuite):
    """LangChain's suite."""

    @property
    def params(self) -> dict[str, Any]:
        return {"model": "m", "engine": FakeEngine()}


def test_what_is_found_is_warm(llm: ChatMiniPIC) -> None:
    retriever = WarmingRetriever(retriever=Retriever(), llm=llm, prompt=PROMPT)
    assert states(llm, DOCUMENTS) == ["cold"] * 3
    found = retriever.invoke("Who?")
    retriever.flush()
    assert {document.page_content for document in found} == {d.page_content for d in DOCUMENTS}
    assert states(llm, DOCUMENTS) == ["warm"] * 3


async def test_what_is_found_asynchronously_is_warm(llm: ChatMiniPIC) -> None:
    retriever = WarmingRetriever(retriever=Retriever(), llm=llm, prompt=PROMPT, k=2)
    found = await retriever.ainvoke("Who?")
    retriever.flush()
    assert len(found) == 2
    assert states(llm, found) == ["warm"] * 2


def test_retrieval_goes_on_where_warming_fails(llm: ChatMiniPIC) -> None:
    """The log is read at the logger itself: what other libraries do to its parents, or switch off
    for the process, is not the retriever's doing."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("langchain_minipic.retrievers")
    before = (logger.level, logger.disabled, logging.root.manager.disable)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.disabled = False
    logging.disable(logging.NOTSET)
    try:
        retriever = WarmingRetriever(retriever=Retriever(), llm=llm)  # no prefix known, no prompt
        assert retriever.invoke("Who?")
        retriever.flush()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.disabled = before[1]
        logging.disable(before[2])
    assert len(seen) == 1
    assert "no prefix" in seen[0]


def test_index_and_warm(llm: ChatMiniPIC, capsys: pytest.CaptureFixture[str]) -> None:
    store = vectors()
    report = index_and_warm(
        iter(DOCUMENTS), llm=llm, prompt=PROMPT, vector_store=store, batch_size=2
    )
    assert report.num_spans == 3
    assert report.num_computed_tokens > 0
    assert [d.page_content for d in store.get_by_ids(report.details["ids"])] == [
        document.page_content for document in DOCUMENTS
    ]
    assert states(llm, DOCUMENTS) == ["warm"] * 3
    assert "3document" in capsys.readouterr().err.replace(" ", "")
    again = index_and_warm(DOCUMENTS, llm=llm, prompt=PROMPT, progress=False)
    assert (again.num_computed_tokens, again.details["ids"]) == (0, [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("system", "human", "variable"),
    [
        ("Answer.", "{context}\n\n{question}", "context"),
        ("You are {who}.", "{context}\n\n{question}", "who"),
        ("You are {who}.", "{examples}\n\n{context}\n\n{question}", "who"),
        ("Answer.", "{examples}\n\n{context}\n\n{question}", "context"),
        ("Answer.", "{examples}\n\nNothing is open.", None),
    ],
)
def test_warming_tells_which_variable_it_took_for_the_documents(
    llm: ChatMiniPIC, system: str, human: str, variable: str | None
) -> None:
    """One left open in front of the documents is taken for them: spans of a prefix of nobody's."""
    prompt = SpanPromptTemplate.from_messages([("system", system), ("human", human)])
    if "examples" in prompt.input_variables:
        prompt = prompt.partial(examples=[Document("An example.", id="an example")])
    assert llm.warm(DOCUMENTS, prompt).details.get("variable") == variable
    indexed = index_and_warm(DOCUMENTS, llm=llm, prompt=prompt, progress=False, batch_size=2)
    assert indexed.details.get("variable") == variable


def test_wrong_batches_are_refused(llm: ChatMiniPIC) -> None:
    with pytest.raises(ConfigurationError, match="batch_size=0"):
        index_and_warm(DOCUMENTS, llm=llm, batch_size=0)
    with pytest.raises(PromptError):
        index_and_warm(["text", 3], llm=llm, prompt=PROMPT, progress=False)  # type: ignore[list-item]
