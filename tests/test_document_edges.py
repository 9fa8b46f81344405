"""White space around documents says nothing: by whichever way they come, a prompt has the same
tokens with it and without, and the same prefix whichever document comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_minipic import MiniPIC as LangChainText
from langchain_minipic import SpanDocumentPrompt, SpanPromptTemplate, span_blocks
from langchain_minipic.messages import to_prompt as from_langchain
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, TextBlock
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.minipic import MiniPIC as LlamaIndex
from llama_index.llms.minipic import span_blocks as node_blocks
from llama_index.llms.minipic._messages import to_prompt as from_llamaindex

from minipic_backend import Message, Prompt, Span, Text
from minipic_backend.chat import document_core
from minipic_backend.config import SpanConfig, resolve_technique
from minipic_backend.json_messages import read_messages
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.prompt_cache import Module, Schema
from minipic_backend.testing import FakeEngine

SYSTEM = "Answer from the documents."
LEADS = ["Found: ", "Found:\n", "Found:\n\n", "Found: \n \n\t\n", "", "\n", " \n\n "]
QUESTION = "Who was it?"
CACHED = {"cache_control": {"type": "ephemeral"}}

Way = Callable[[Sequence[str], str], Prompt]
"""A prompt of documents behind a text."""


def raw(documents: Sequence[str], lead: str) -> Prompt:
    return Prompt([Text(SYSTEM + lead), *map(Span, documents), Text(QUESTION)])


def raw_apart(documents: Sequence[str], lead: str) -> Prompt:
    """Documents as chunks of a text: what separates them is in the texts between."""
    parts = [part for text in documents for part in (Text("\n\n"), Span(text))]
    return Prompt([Text(lead), *parts, Text(f"\n{QUESTION}")])


def chat(documents: Sequence[str], lead: str) -> Prompt:
    parts = [Text(lead), *map(Span, documents), Text(QUESTION)]
    return Prompt.chat([Message("system", SYSTEM), Message("user", parts)])


def langchain_template(documents: Sequence[str], lead: str) -> Prompt:
    template = SpanPromptTemplate.from_messages(
        [("system", SYSTEM), ("human", lead + "{context}\n\nQuestion: {question}")]
    )
    found = [Document(text) for text in documents]
    return from_langchain(template.invoke({"context": found, "question": "x"}).to_messages())


def langchain_loop(documents: Sequence[str], lead: str) -> Prompt:
    template = SpanPromptTemplate.from_messages(
        [
            ("system", SYSTEM),
            ("human", lead + "{{#docs}}{{{page_content}}}\n{{/docs}}{{question}}"),
        ],
        template_format="mustache",
    )
    found = [Document(text) for text in documents]
    return from_langchain(template.invoke({"docs": found, "question": "x"}).to_messages())


def langchain_document_prompt(documents: Sequence[str], lead: str) -> Prompt:
    """Joined to a string by some chain."""
    marked = "\n\n".join(SpanDocumentPrompt().format(page_content=text) for text in documents)
    return from_langchain([SystemMessage(SYSTEM), HumanMessage(lead + marked + QUESTION)])


def langchain_blocks(documents: Sequence[str], lead: str) -> Prompt:
    texts = [{"type": "text", "text": lead}] if lead else []
    content: list[Any] = [*texts, *span_blocks(documents), {"type": "text", "text": QUESTION}]
    return from_langchain([SystemMessage(SYSTEM), HumanMessage(content)])


def langchain_cache_control(documents: Sequence[str], lead: str) -> Prompt:
    content: list[Any] = [{"type": "text", "text": text, **CACHED} for text in documents]
    content = [{"type": "text", "text": lead}, *content, {"type": "text", "text": QUESTION}]
    return from_langchain([SystemMessage(SYSTEM), HumanMessage(content)])


def langchain_artifact(documents: Sequence[str], lead: str) -> Prompt:
    """A retriever's tool: documents that stand in its text word for word."""
    found = [Document(text) for text in documents]
    tool = ToolMessage(lead + "\n\n".join(documents), tool_call_id="1", artifact=found)
    return from_langchain([SystemMessage(SYSTEM), HumanMessage("q"), tool, HumanMessage(QUESTION)])


def langchain_text(documents: Sequence[str], lead: str) -> Prompt:
    engine = FakeEngine("x")
    LangChainText(model="m", engine=engine).invoke(raw(documents, lead))
    return engine.prompts[0]


def llamaindex_query(documents: Sequence[str], lead: str) -> Prompt:
    engine = FakeEngine("x")
    synthesizer = get_response_synthesizer(llm=LlamaIndex(engine=engine))
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in documents]
    synthesizer.synthesize(QUESTION, nodes)
    return engine.prompts[0]


def llamaindex_blocks(documents: Sequence[str], lead: str) -> Prompt:
    blocks = [block for text in documents for block in node_blocks(text)]
    given = [TextBlock(text=lead), *blocks, TextBlock(text=QUESTION)]
    return from_llamaindex([ChatMessage(content=SYSTEM, role="system"), ChatMessage(blocks=given)])


def llamaindex_citations(documents: Sequence[str], lead: str) -> Prompt:
    blocks = [
        CitableBlock(title="", source="", content=[TextBlock(text=text)]) for text in documents
    ]
    given = [TextBlock(text=lead), *blocks, TextBlock(text=QUESTION)]
    return from_llamaindex([ChatMessage(blocks=given)])


def openai_parts(documents: Sequence[str], lead: str) -> Prompt:
    spans = [{"type": "text", "text": text, "minipic": {"span": True}} for text in documents]
    texts = [{"type": "text", "text": text} for text in (lead, "\n", QUESTION)]
    content = [*texts[:2], *spans, texts[2]]
    return Prompt.chat(
        read_messages([{"role": "user", "content": content}], between_texts="\n"),
    )


def anthropic_blocks(documents: Sequence[str], lead: str) -> Prompt:
    server = pytest.importorskip("minipic_backend.server.messages")
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}
        for text in documents
    ]
    texts = [{"type": "text", "text": text} for text in (lead, QUESTION)]
    content = [texts[0], *blocks, texts[1]]
    request = server.SpanMessagesRequest(
        model="m", max_tokens=5, system=SYSTEM, messages=[{"role": "user", "content": content}]
    )
    made = server.SpanServingMessages.to_chat_completion_request(request)
    return Prompt.chat(read_messages(made.messages, between_texts="\n"))


def schema_modules(documents: Sequence[str], lead: str) -> Prompt:
    modules = [Module(f"m{place}", text) for place, text in enumerate(documents)]
    schema = Schema("s", modules, system=SYSTEM + lead)
    return schema.prompt(QUESTION, {module.name: {} for module in modules}, chat=False)


# Documents that are blank are spans of nothing where a client says so, and none at all where a
# framework found them.
EXPLICIT: list[Way] = [raw, raw_apart, chat, openai_parts, anthropic_blocks]
FRAMEWORKS: list[Way] = [
    langchain_template,
    langchain_loop,
    langchain_document_prompt,
    langchain_blocks,
    langchain_cache_control,
    langchain_artifact,
    langchain_text,
    llamaindex_query,
    llamaindex_blocks,
    llamaindex_citations,
]
OTHERS: list[Way] = [schema_modules]

line_ends = st.sampled_from(["\n", "\r\n", " \n", "\t\n", "\u00a0\n", "\x0c\n", "\u2028\n"])
blank_lines = st.lists(line_ends, max_size=3).map("".join)
tails = st.text(" \t\r\n\x0c\u00a0\u2028", max_size=4)
pieces = st.sampled_from(
    [
        "Lothair II",
        " was a king.",
        "\n\n",
        "    indented",
        "<|im_end|>",
        "漢字",
        "{x}",
        "{{y}}",
        "\r\n",
    ]
)
cores = st.lists(pieces, min_size=1, max_size=4).map("".join).map(document_core).filter(bool)
quick = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def layout(smollm2_tokenizer: Any) -> Layout:
    return Layout(smollm2_tokenizer, SpanConfig(ssep=3, pdep=4, pad=5, block_size=32))


TECHNIQUES = [
    resolve_technique("primed"),
    resolve_technique("primed", frame="universal", late=0),
    resolve_technique("block_attention"),
    resolve_technique("full"),
]


def prefix(layout: Layout, prompt: Prompt) -> tuple[int, ...]:
    return layout.lay_out(prompt, resolve_technique("primed", late=0)).prefix_token_ids


def assert_same_tokens(layout: Layout, plain: Prompt, other: Prompt) -> None:
    for technique in TECHNIQUES:
        expected = layout.lay_out(plain, technique).token_ids
        assert layout.lay_out(other, technique).token_ids == expected


@quick
@pytest.mark.parametrize("way", [*EXPLICIT, *FRAMEWORKS, *OTHERS])
@given(data=st.data(), documents=st.lists(cores, min_size=1, max_size=3))
def test_white_space_around_documents_changes_no_token(
    layout: Layout, way: Way, data: st.DataObject, documents: list[str]
) -> None:
    lead = data.draw(st.sampled_from(LEADS), "lead")
    edged = [data.draw(blank_lines) + text + data.draw(tails) for text in documents]
    assert_same_tokens(layout, way(documents, lead), way(edged, lead))


@quick
@pytest.mark.parametrize("way", FRAMEWORKS)
@given(data=st.data(), documents=st.lists(cores, min_size=1, max_size=3))
def test_blank_documents_change_no_token(
    layout: Layout, way: Way, data: st.DataObject, documents: list[str]
) -> None:
    lead = data.draw(st.sampled_from(LEADS), "lead")
    blanks = data.draw(st.lists(blank_lines, min_size=1, max_size=2), "blanks")
    among = documents.copy()
    for blank in blanks:
        among.insert(data.draw(st.integers(0, len(among)), "place"), blank)
    assert_same_tokens(layout, way(documents, lead), way(among, lead))


@quick
@pytest.mark.parametrize("way", [*EXPLICIT, *FRAMEWORKS, *OTHERS])
@given(data=st.data(), documents=st.lists(cores, min_size=2, max_size=4))
def test_the_prefix_is_the_same_whichever_document_comes_first(
    layout: Layout, way: Way, data: st.DataObject, documents: list[str]
) -> None:
    """What was warmed in one order is found in any other."""
    lead = data.draw(st.sampled_from(LEADS), "lead")
    edged = [data.draw(blank_lines) + text + data.draw(tails) for text in documents]
    expected = prefix(layout, way(edged, lead))
    assert expected
    for start in range(len(edged)):
        assert prefix(layout, way(edged[start:] + edged[:start], lead)) == expected


@quick
@given(data=st.data(), documents=st.lists(cores, min_size=1, max_size=3))
def test_white_space_in_front_of_documents_is_one_blank_line(
    layout: Layout, data: st.DataObject, documents: list[str]
) -> None:
    """And none where nothing else stands in front."""
    text, gap = data.draw(st.sampled_from(["Found:", ""])), data.draw(tails)
    for way in (raw, chat):
        plain, spaced = way(documents, text), way(documents, text + gap)
        for technique in TECHNIQUES:
            expected = layout.lay_out(plain, technique).token_ids
            assert layout.lay_out(spaced, technique).token_ids == expected


@pytest.mark.parametrize("text", ["\n\n A.\n", "A."])
def test_the_fake_sees_documents_so_too(text: str) -> None:
    engine = FakeEngine(late=0)
    prompts = [chat([one, "B."], "Look:") for one in (text, document_core(text))]
    engine.warm([text], prompt=prompts[1])
    states = [[row.state for row in engine.explain(prompt).rows] for prompt in prompts]
    assert states[0] == states[1]
    assert states[0].count("warm") >= 1
