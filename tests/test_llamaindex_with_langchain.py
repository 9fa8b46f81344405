"""Both integrations end at the same prompt: a document is the same span in either."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_minipic import SpanPromptTemplate
from langchain_minipic.messages import to_prompt as from_langchain
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.minipic import MiniPIC, span_blocks
from llama_index.llms.minipic._messages import to_prompt as from_llamaindex

from minipic_backend.config import SpanConfig, resolve_technique
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.testing import FakeEngine

TEXTS = [
    "Lothair II was a king.",
    "\n\n  Indented, and ended by white space. \t\n",
    "Two\n\nparagraphs: {context_str} <|im_end|> ünïcödé 漢字 🙂",
]


@pytest.fixture(scope="module")
def layout(smollm2_tokenizer: Any) -> Layout:
    return Layout(smollm2_tokenizer, SpanConfig(ssep=3, pdep=4, pad=5, block_size=32))


def spans(layout: Layout, prompt: Any) -> list[tuple[int, ...]]:
    settings = resolve_technique("primed", late=0)
    laid_out = layout.lay_out(prompt, settings)
    assert laid_out.table is not None
    return [
        laid_out.token_ids[segment.start : segment.end]
        for segment in laid_out.table.segments
        if segment.kind.value == "span"
    ]


def test_the_same_text_is_the_same_span(layout: Layout) -> None:
    template = SpanPromptTemplate.from_messages(
        [("system", "Use the documents."), ("human", "{context}\n\nQuestion: {question}")]
    )
    documents = [Document(text) for text in TEXTS]
    value = template.invoke({"context": documents, "question": "Who?"})
    theirs = spans(layout, from_langchain(value.to_messages()))

    engine = FakeEngine("x")
    synthesizer = get_response_synthesizer(llm=MiniPIC(engine=engine))
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]
    synthesizer.synthesize("Who?", nodes)
    ours = spans(layout, engine.prompts[0])

    blocks = [block for text in TEXTS for block in span_blocks(text)]
    by_hand = from_llamaindex([ChatMessage(blocks=[*blocks, TextBlock(text="Who?")])])
    assert theirs == ours
    assert sorted(theirs) == sorted(spans(layout, by_hand))  # which have no ranks, and no order
    assert len(theirs) == len(TEXTS)


def test_the_same_prompt_is_the_same_tokens(layout: Layout) -> None:
    """Template, primer and question too: so that both share the cache of one engine."""
    template = SpanPromptTemplate.from_messages(
        [("system", "Use the documents."), ("human", "{context}\n\nQuestion: {question}")]
    )
    documents = [Document(text) for text in TEXTS]
    value = template.invoke({"context": documents, "question": "Who?"})
    theirs = from_langchain(value.to_messages())

    engine = FakeEngine("x")
    synthesizer = get_response_synthesizer(
        llm=MiniPIC(engine=engine),
        text_qa_template=ChatPromptTemplate(
            message_templates=[
                ChatMessage(role="system", content="Use the documents."),
                ChatMessage(content="{context_str}\n\nQuestion: {query_str}"),
            ]
        ),
    )
    nodes = [
        NodeWithScore(node=TextNode(text=text), score=1 - place / 10)
        for place, text in enumerate(TEXTS)
    ]
    synthesizer.synthesize("Who?", nodes)
    settings = resolve_technique("primed")
    assert (
        layout.lay_out(theirs, settings).token_ids
        == layout.lay_out(engine.prompts[0], settings).token_ids
    )
