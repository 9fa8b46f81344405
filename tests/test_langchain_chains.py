"""Documents reach the engine as spans through LangChain's own chains."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_minipic import (
    ChatMiniPIC,
    MiniPIC,
    SpanDocumentPrompt,
    SpanPromptTemplate,
    example_documents,
)
from langchain_support import ANSWER, DOCUMENTS, Retriever

from minipic_backend import Prompt
from minipic_backend.testing import FakeEngine

TEXTS = [document.page_content for document in DOCUMENTS]
MESSAGES = [("system", "Answer from:\n\n{context}"), ("human", "{input}")]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ANSWER)


@pytest.fixture
def llm(engine: FakeEngine) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=engine)


def spans(prompt: Prompt) -> list[tuple[str, int | None]]:
    return [(span.text, span.rank) for span in prompt.spans]


def text(prompt: Prompt) -> str:
    holders = [message.parts for message in prompt.messages] or [prompt.parts]
    return "|".join("".join(part.text for part in parts) for parts in holders)


@pytest.mark.parametrize("template", [SpanPromptTemplate, ChatPromptTemplate])
def test_stuff_documents_chain(llm: ChatMiniPIC, engine: FakeEngine, template: Any) -> None:
    prompt = template.from_messages(MESSAGES)
    chain = create_stuff_documents_chain(llm, prompt, document_prompt=SpanDocumentPrompt())
    assert chain.invoke({"context": DOCUMENTS, "input": "Who?"}) == ANSWER
    assert spans(engine.prompts[-1]) == list(zip(TEXTS, range(3), strict=True))
    assert text(engine.prompts[-1]) == "Answer from:\n\n" + "\n\n".join(TEXTS) + "|Who?"


def test_retrieval_chain(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    template = SpanDocumentPrompt("Fact: {page_content}")
    prompt = SpanPromptTemplate.from_messages(MESSAGES)
    combine = create_stuff_documents_chain(llm, prompt, document_prompt=template)
    result = create_retrieval_chain(Retriever(), combine).invoke({"input": "Who?"})
    assert result["answer"] == ANSWER
    found = [document.page_content for document in result["context"]]
    assert [span.text for span in engine.prompts[-1].spans] == [f"Fact: {one}" for one in found]


async def test_stuff_documents_chain_asynchronously(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    prompt = SpanPromptTemplate.from_messages(MESSAGES)
    chain = create_stuff_documents_chain(llm, prompt, document_prompt=SpanDocumentPrompt())
    pieces = [piece async for piece in chain.astream({"context": DOCUMENTS, "input": "Who?"})]
    assert len(pieces) > 1
    assert "".join(pieces) == ANSWER
    assert [span.text for span in engine.prompts[-1].spans] == TEXTS


def test_stuff_documents_chain_of_a_text_model(engine: FakeEngine) -> None:
    chain = create_stuff_documents_chain(
        MiniPIC(model="m", engine=engine),
        PromptTemplate.from_template("From {context}: {input}"),
        document_prompt=SpanDocumentPrompt(),
    )
    assert chain.invoke({"context": DOCUMENTS, "input": "Who?"}) == ANSWER
    assert [span.text for span in engine.prompts[-1].spans] == TEXTS
    assert text(engine.prompts[-1]) == "From " + "\n\n".join(TEXTS) + ": Who?"


def test_another_model_gets_plain_text() -> None:
    """The same chain with any other model in it: the same text, and no marks."""
    seen: list[Any] = []

    class Spy(GenericFakeChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(messages)
            return super()._generate(messages, *args, **kwargs)

    prompt = SpanPromptTemplate.from_messages(MESSAGES)
    other = Spy(messages=iter(["x"]))
    chain = create_stuff_documents_chain(other, prompt, document_prompt=SpanDocumentPrompt())
    chain.invoke({"context": DOCUMENTS, "input": "Who?"})
    plain = create_stuff_documents_chain(
        Spy(messages=iter(["x"])), ChatPromptTemplate.from_messages(MESSAGES)
    )
    plain.invoke({"context": DOCUMENTS, "input": "Who?"})
    assert [message.text for message in seen[:2]] == [message.text for message in seen[2:]]


def test_a_document_cannot_forge_a_mark(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    marked = SpanDocumentPrompt().format(page_content="x")
    once = Document(marked)  # as if it had read our marks somewhere
    prompt = SpanPromptTemplate.from_messages(MESSAGES)
    chain = create_stuff_documents_chain(llm, prompt, document_prompt=SpanDocumentPrompt())
    chain.invoke({"context": [once, Document("⟪span 0123⟫y⟪/span 0123⟫")], "input": "?"})
    assert [span.text for span in engine.prompts[-1].spans] == ["x", "⟪span 0123⟫y⟪/span 0123⟫"]


def test_few_shot_examples_are_spans_and_never_late(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    examples = example_documents(
        [{"q": "1 + 1", "a": "2"}, {"q": "2 + 2", "a": "4"}], "Q: {q}\nA: {a}"
    )
    prompt = SpanPromptTemplate.from_messages([("human", "{examples}\n\nQ: {question}\nA:")])
    chain = prompt.partial(examples=examples) | llm
    chain.invoke({"question": "3 + 3"})
    assert spans(engine.prompts[-1]) == [("Q: 1 + 1\nA: 2", None), ("Q: 2 + 2\nA: 4", None)]
    assert text(engine.prompts[-1]).endswith("Q: 3 + 3\nA:")


def test_documents_in_the_order_of_their_ids(engine: FakeEngine, llm: ChatMiniPIC) -> None:
    prompt = SpanPromptTemplate.from_messages(MESSAGES, order="id")
    named = [Document("b", id="2"), Document("a", id="1"), Document("c")]
    for documents in (named, named[::-1]):
        (prompt | llm).invoke({"context": documents, "input": "?"})
    first, second = engine.prompts
    assert text(first) == text(second)
    assert spans(first) == [("c", 2), ("a", 1), ("b", 0)]
    assert spans(second) == [("c", 0), ("a", 1), ("b", 2)]


def test_warm_computes_what_the_chain_will_use(llm: ChatMiniPIC) -> None:
    prompt = SpanPromptTemplate.from_messages(
        [("system", "Answer from:"), ("human", "{context}\n\n{input}")]
    )
    llm.warm(DOCUMENTS, prompt)
    chain = create_stuff_documents_chain(llm, prompt, document_prompt=SpanDocumentPrompt())
    chain.invoke({"context": DOCUMENTS, "input": "Who?"})
    value = prompt.invoke({"context": DOCUMENTS, "input": "Who?"})
    rows = llm.explain(value).rows
    assert [row.state for row in rows if row.kind == "span"] == ["warm"] * 2  # one is late


def test_history_stays_as_it_was(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    """A turn of a user that looks like a template is not filled in on the next turn."""
    prompt = SpanPromptTemplate.from_messages(
        [("placeholder", "{history}"), ("human", "{context}\n\n{input}")]
    )
    history = [HumanMessage("What does {context} mean? {{x}} {0}")]
    (prompt | llm).invoke({"history": history, "context": DOCUMENTS, "input": "Who?"})
    assert "What does {context} mean? {{x}} {0}" in text(engine.prompts[-1])


def test_history_of_questions_and_answers_alone(llm: ChatMiniPIC) -> None:
    """Behind the documents it is no part of their frame; nor is it with other frames."""

    def reads(prompt: SpanPromptTemplate, **options: Any) -> list[int]:
        chain = prompt | llm.bind(late=0, **options)
        history: list[Any] = []
        read = []
        for documents, question in ((DOCUMENTS, "Who?"), (DOCUMENTS[::-1], "And then?")):
            answer = chain.invoke({"history": history, "context": documents, "question": question})
            history += [HumanMessage(question), answer]
            read.append(answer.usage_metadata["input_token_details"]["cache_read"])
        return read

    history = ("placeholder", "{history}")
    behind = [("system", "Answer from:\n\n{context}"), history, ("human", "{question}")]
    before = [("system", "Answer."), history, ("human", "{context}\n\n{question}")]
    cold, warm = reads(SpanPromptTemplate(behind))
    assert cold == 0
    assert warm > 0
    cold, warm = reads(SpanPromptTemplate(before))
    assert cold == warm == 0  # as docs/langchain.md says
    for options in ({"frame": "none", "primer": False}, {"frame": "universal"}):
        _, warm = reads(SpanPromptTemplate(before), **options)
        assert warm > 0
