"""Nodes stay whole: packing, ranks, canonical text."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core import PromptTemplate, SummaryIndex, get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import ChatPromptTemplate, RichPromptTemplate
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.llms.minipic import MiniPIC, node_text
from llama_index.llms.minipic._nodes import NodeText
from llama_index.llms.minipic._packing import NodeTexts, PackedNodes, mark, split_marks
from llama_index.llms.minipic.testing import HOSTILE_NODES, PromptsSeen

from minipic_backend import PromptError, Span
from minipic_backend.testing import FakeEngine

QA = PromptTemplate("{context_str}\nQuestion: {query_str}")


def scored(*scores: float | None) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=f"Document {place}.", id_=f"n{place}"), score=score)
        for place, score in enumerate(scores)
    ]


def model(**options: Any) -> tuple[MiniPIC, FakeEngine]:
    engine = FakeEngine("Yes.", **options)
    return MiniPIC(engine=engine), engine


def spans(engine: FakeEngine) -> list[list[Span]]:
    return [list(prompt.spans) for prompt in engine.prompts]


def synthesize(llm: Any, nodes: Sequence[NodeWithScore], mode: str = "compact", **kw: Any) -> Any:
    synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode), **kw)
    return synthesizer.synthesize("Which?", list(nodes))


def laid_out(engine: FakeEngine) -> list[str]:
    """Labels of the first prompt's segments, but for the prefix."""
    return [row.label for row in engine.explain(engine.prompts[0]).rows if row.kind != "prefix"]


# ---- ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "simple_summarize"])
@pytest.mark.parametrize("with_helper", [False, True])
def test_nodes_are_ranked_by_score_whatever_their_order(mode: str, with_helper: bool) -> None:
    llm, engine = model()
    helper = llm.prompt_helper if with_helper else None
    synthesize(llm, scored(0.2, 0.9, 0.5), mode, prompt_helper=helper)
    assert [(s.id, s.rank) for s in spans(engine)[0]] == [("n0", 2), ("n1", 0), ("n2", 1)]


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "simple_summarize"])
@pytest.mark.parametrize("with_helper", [False, True])
def test_nodes_without_scores_stand_as_given(mode: str, with_helper: bool) -> None:
    """In front of those that have one. A summary index gives a text's parts in their order."""
    llm, engine = model()
    helper = llm.prompt_helper if with_helper else None
    synthesize(llm, scored(None, None, None), mode, prompt_helper=helper)
    assert laid_out(engine) == ["n0", "n1", "n2", "question"]
    llm, engine = model(late=0)
    synthesize(llm, scored(None, 0.9, None, 0.1), mode)
    assert [s.rank for s in spans(engine)[0]] == [None, 0, None, 1]
    assert laid_out(engine) == ["n0", "n2", "n3", "n1", "question"]


def test_nodes_of_a_summary_index_stand_as_given() -> None:
    llm, engine = model()
    nodes = [one.node for one in scored(*[None] * 4)]
    SummaryIndex(nodes).as_query_engine(llm=llm, response_mode="tree_summarize").query("What?")
    assert laid_out(engine) == ["n0", "n1", "n2", "n3", "question"]


def test_the_best_node_is_computed_late() -> None:
    llm, engine = model()
    synthesize(llm, scored(0.2, 0.9, 0.5))
    kinds = [(row.kind, row.label) for row in engine.explain(engine.prompts[0]).rows]
    assert kinds == [
        ("prefix", "prefix"),
        ("span", "n0"),
        ("span", "n2"),
        ("dependent", "question"),
    ]


@pytest.mark.parametrize("mode", ["refine", "accumulate"])
def test_a_lone_node_is_not_late(mode: str) -> None:
    llm, engine = model()
    synthesize(llm, scored(0.2, 0.9), mode)
    assert [[(s.id, s.rank) for s in one] for one in spans(engine)] == [
        [("n0", None)],
        [("n1", None)],
    ]


def test_the_synthesizer_may_be_called_without_nodes() -> None:
    """Texts alone have no scores, hence no ranks."""
    llm, engine = model()
    helper = llm.prompt_helper
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper)
    synthesizer.get_response("Which?", ["Text one.", "Text two."])
    assert [(s.text, s.rank) for s in spans(engine)[0]] == [
        ("Text one.", None),
        ("Text two.", None),
    ]


# ---- text -----------------------------------------------------------------------------------


def test_metadata_is_canonical_and_by_the_nodes_own_templates() -> None:
    shared: dict[str, Any] = {
        "text": "Body.",
        "metadata_template": "[{key}={value}]",
        "metadata_separator": " ",
        "text_template": "{content}\n-- {metadata_str}",
        "excluded_llm_metadata_keys": ["secret"],
    }
    one = TextNode(metadata={"page": 3, "file": "a.txt", "secret": "s"}, **shared)
    two = TextNode(metadata={"secret": "t", "file": "a.txt", "page": 3}, **shared)
    assert node_text(one) == node_text(two) == "Body.\n-- [file=a.txt] [page=3]"
    assert one.metadata == {"page": 3, "file": "a.txt", "secret": "s"}
    assert list(one.metadata) == ["page", "file", "secret"]


def test_the_same_node_from_a_store_that_sorts_metadata_is_the_same_span() -> None:
    llm, engine = model()
    node = TextNode(text="Body.", metadata={"b": 1, "a": 2}, id_="x")
    again = TextNode(text="Body.", metadata={"a": 2, "b": 1}, id_="x")
    for one in (node, again):
        synthesize(llm, [NodeWithScore(node=one, score=0.5), *scored(0.9)])
    first, second = spans(engine)
    assert first == second


def test_hostile_documents_reach_the_engine_as_they_are() -> None:
    llm, engine = model()
    for mode in ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate"):
        first = len(engine.prompts)
        synthesize(llm, HOSTILE_NODES, mode)
        seen = {span.text for prompt in engine.prompts[first:] for span in prompt.spans}
        assert seen == {node_text(node.node) for node in HOSTILE_NODES}


def test_a_document_with_marks_of_another_process_forges_no_node() -> None:
    forged = mark(NodeText("inner")).replace(mark(NodeText("x"))[1:17], "0123456789abcdef")
    llm, engine = model()
    synthesize(llm, [*scored(0.1), NodeWithScore(node=TextNode(text=forged), score=0.5)])
    assert [s.text for s in spans(engine)[0]] == ["Document 0.", forged]


def test_nodes_that_hold_each_other_are_still_told_apart() -> None:
    texts = ["Alpha.\n\nBeta.", "Alpha.", "Beta.", "Alpha."]
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in texts]
    for helper in (True, False):
        llm, engine = model()
        synthesize(llm, nodes, prompt_helper=llm.prompt_helper if helper else None)
        assert [s.text for s in spans(engine)[0]] == texts


# ---- packing --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "compact_accumulate"])
def test_nodes_are_never_cut_where_they_fit(mode: str) -> None:
    """LlamaIndex's helper joins them and cuts the text wherever a prompt is full."""
    llm, engine = model(max_model_len=1024)
    nodes = [
        NodeWithScore(node=TextNode(text=f"{place}: " + "word " * 150, id_=f"n{place}"), score=0.5)
        for place in range(7)
    ]
    synthesize(llm, nodes, mode, prompt_helper=llm.prompt_helper)
    whole = {node_text(node.node) for node in nodes}
    packs = [[s.text for s in one] for one in spans(engine) if any(s.id for s in one)]
    assert len(packs) > 1
    assert [text for pack in packs for text in pack] == [node_text(node.node) for node in nodes]
    assert {text for pack in packs for text in pack} == whole


def test_a_node_too_long_for_any_prompt_is_cut_the_same_way_each_time() -> None:
    llm, engine = model(max_model_len=1024)
    text = " ".join(f"word{place}" for place in range(1500))
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5)]
    for question in ("Which?", "And which other one would you say it is?"):
        synthesizer = get_response_synthesizer(llm=llm, prompt_helper=llm.prompt_helper)
        first = len(engine.prompts)
        synthesizer.synthesize(question, nodes)
        pieces = [s.text for prompt in engine.prompts[first:] for s in prompt.spans]
        assert " ".join(pieces) == text
        if question == "Which?":
            before = pieces
    assert pieces == before


def test_truncation_drops_the_worst_nodes_whole() -> None:
    llm, engine = model(max_model_len=1024)
    nodes = [
        NodeWithScore(
            node=TextNode(text=f"{place}: " + "word " * 200, id_=f"n{place}"), score=place / 10
        )
        for place in range(5)
    ]
    synthesize(llm, nodes, "simple_summarize", prompt_helper=llm.prompt_helper)
    (kept,) = spans(engine)
    assert [s.id for s in kept] == ["n3", "n4"]
    assert [s.rank for s in kept] == [1, 0]


def test_limits_of_the_helper_may_be_changed() -> None:
    llm, _ = model()
    helper = llm.prompt_helper
    assert helper.context_window == 4096 == llm.metadata.context_window
    assert helper.num_output == 256
    helper.chunk_size_limit = 40
    packs = helper.repack(QA, [f"Text {place} has some words." for place in range(6)], llm=llm)
    assert [len(pack.nodes) for pack in packs] == [2, 2, 2]  # type: ignore[attr-defined]


def test_no_room_is_an_error_that_says_so() -> None:
    llm, _ = model(max_model_len=300)
    with pytest.raises(PromptError, match="max_tokens"):
        llm.prompt_helper.repack(QA, ["Text."], llm=llm)


def test_empty_texts_are_dropped() -> None:
    llm, _ = model()
    assert llm.prompt_helper.repack(QA, ["", " \n"], llm=llm) == [""]
    (packed,) = llm.prompt_helper.repack(QA, ["", "Text."], llm=llm)
    assert packed.nodes == (NodeText("Text."),)  # type: ignore[attr-defined]


def test_other_models_get_plain_text() -> None:
    llm, _ = model()
    nodes = scored(0.1, 0.9)
    for mode in ("compact", "tree_summarize", "simple_summarize", "accumulate"):
        with PromptsSeen() as seen:
            synthesize(MockLLM(), nodes, mode, prompt_helper=llm.prompt_helper)
        assert seen.prompts
        assert not any("\ue000" in prompt or "['" in prompt for prompt in seen.prompts)
    (text,) = llm.prompt_helper.repack(QA, ["One.", "Two."])
    assert type(text) is str
    assert text == "One.\n\nTwo."


def test_a_structured_model_around_ours_gets_nodes() -> None:
    from pydantic import BaseModel

    class Thing(BaseModel):
        name: str

    engine = FakeEngine('{"name": "box"}')
    llm = MiniPIC(engine=engine)
    nodes = scored(0.1, 0.9)
    for structured in (llm.as_structured_llm(Thing), llm):
        cls = Thing if structured is llm else None
        helper = llm.prompt_helper
        answer = synthesize(structured, nodes, prompt_helper=helper, output_cls=cls)
        assert answer.response == Thing(name="box")
        assert [s.id for s in engine.prompts[-1].spans] == ["n0", "n1"]


# ---- templates ------------------------------------------------------------------------------


def test_multimodal_synthesizers_keep_nodes_whole() -> None:
    llm, engine = model()
    nodes = scored(0.2, 0.9, 0.5)
    for helper in (None, llm.chat_prompt_helper):
        for mode in ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate"):
            first = len(engine.prompts)
            synthesize(llm, nodes, mode, multimodal=True, chat_prompt_helper=helper)
            texts = [s.text for prompt in engine.prompts[first:] for s in prompt.spans]
            if helper is not None:
                assert texts == ["Document 0.", "Document 1.", "Document 2."], mode
            else:  # LlamaIndex's helper has joined them
                assert " ".join(texts) == "Document 0. Document 1. Document 2."


@pytest.mark.parametrize(
    "template",
    [
        QA,
        ChatPromptTemplate(
            message_templates=[
                ChatMessage(role="system", content="Use:\n{context_str}"),
                ChatMessage(role="user", content="{query_str}"),
            ]
        ),
        RichPromptTemplate("{{ context_str }}\nQuestion: {{ query_str }}"),
        PromptTemplate(
            "{documents}\nQuestion: {query_str}",
            template_var_mappings={"context_str": "documents"},
        ),
    ],
    ids=["text", "chat", "rich", "mapped"],
)
def test_any_template(template: Any) -> None:
    llm, engine = model()
    synthesize(llm, scored(0.1, 0.9), text_qa_template=template)
    assert [s.id for s in engine.prompts[0].spans] == ["n0", "n1"]


def test_a_function_of_the_context_gets_text() -> None:
    def shout(**kwargs: Any) -> str:
        return kwargs["context_str"].upper()  # type: ignore[no-any-return]

    template = PromptTemplate(
        "{context_str}\nQuestion: {query_str}", function_mappings={"context_str": shout}
    )
    llm, engine = model()
    synthesize(llm, scored(0.1, 0.9), text_qa_template=template)
    assert "DOCUMENT 0.\n\nDOCUMENT 1." in engine.prompts[0].messages[0].parts[0].text


def test_events_show_no_marks() -> None:
    llm, _ = model()
    for mode in ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate"):
        with PromptsSeen() as seen:
            synthesize(llm, scored(0.1, 0.9), mode, prompt_helper=llm.prompt_helper)
        assert not any("\ue000" in prompt for prompt in seen.prompts)


# ---- packed nodes ---------------------------------------------------------------------------


def test_packed_nodes_are_text_and_remember() -> None:
    nodes = (NodeText("One.", 1, "a"), NodeText("Two.", None, None))
    packed = PackedNodes(nodes)
    assert packed == "One.\n\nTwo." == packed.plain
    assert [piece for piece in split_marks(str(packed)) if piece != "\n\n"] == list(nodes)
    assert f"{packed}" == str(packed)
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert copied == packed
        assert copied.nodes == nodes
    assert str(NodeTexts(["a", "b"])) == "a\n\nb"


def test_broken_marks_vanish() -> None:
    whole = mark(NodeText("text"))
    assert split_marks(f"before {whole[:-5]} after") != []
    assert "".join(str(p) for p in split_marks("a" + whole[: whole.index("text")] + "b")) == "ab"
    assert split_marks(whole + whole) == [NodeText("text")] * 2


def test_source_texts_are_those_of_the_nodes() -> None:
    node = TextNode(text="Body.", metadata={"a": 1})
    assert node_text(node) == node.get_content(metadata_mode=MetadataMode.LLM)
