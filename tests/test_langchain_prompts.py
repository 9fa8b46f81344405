"""Prompt templates keep documents whole, and read as plain text to anyone else."""

from __future__ import annotations

import asyncio
import operator
from collections import OrderedDict, UserDict, UserList, UserString, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_minipic import SpanPromptTemplate, prompts, span_blocks
from langchain_minipic.messages import to_prompt
from langchain_minipic.prompts import SpanHumanMessagePromptTemplate

from minipic_backend import PromptError, Span, rank_spans

F_STRING = [("system", "Answer."), ("human", "{context}\n\nQuestion: {question}")]
MUSTACHE = [("system", "Answer."), ("human", "{{context}}\n\nQuestion: {{{question}}}")]
DOCUMENTS = [
    Document("Lothair II was a king.", id="a", metadata={"title": "Lothair"}),
    Document("Teutberga <b>& {question}</b> {{context}}", metadata={"title": "Teutberga"}),
    Document("  indented = {}\n", metadata={"source": "c.py"}),
]


def make(template: str, **options: Any) -> SpanPromptTemplate:
    messages = F_STRING if template == "f-string" else MUSTACHE
    return SpanPromptTemplate.from_messages(messages, template, **options)  # type: ignore[arg-type]


def spans(messages: list[BaseMessage]) -> list[Span]:
    return list(to_prompt(messages).spans)


def both_ways(prompt: ChatPromptTemplate, values: dict[str, Any]) -> list[BaseMessage]:
    """Formatted sync and async, which must agree."""
    messages = prompt.invoke(values).to_messages()
    assert asyncio.run(prompt.ainvoke(values)).to_messages() == messages
    assert prompt.format_messages(**values) == messages
    return messages


@pytest.mark.parametrize("template", ["f-string", "mustache"])
def test_documents_become_spans_in_one_human_message(template: str) -> None:
    values = {"context": DOCUMENTS, "question": "Who?"}
    messages = both_ways(make(template), values)
    assert [message.type for message in messages] == ["system", "human"]
    assert [block["type"] for block in messages[1].content] == ["text"] * 4  # type: ignore[index]
    assert [(span.rank, span.id) for span in spans(messages)] == [(0, "a"), (1, None), (2, "c.py")]
    assert spans(messages)[1].text == DOCUMENTS[1].page_content


@pytest.mark.parametrize("template", ["f-string", "mustache"])
def test_reads_as_the_plain_text(template: str) -> None:
    """Blocks joined are what a plain template makes of documents joined by blank lines."""
    for documents in (DOCUMENTS, DOCUMENTS[:1], DOCUMENTS[::-1]):
        values = {"context": documents, "question": "Who {context} & <b>?"}
        joined = "\n\n".join(document.page_content for document in documents)
        plain = ChatPromptTemplate.from_messages(F_STRING).invoke({**values, "context": joined})
        messages = make(template).invoke(values).to_messages()
        assert [m.text for m in messages] == [m.text for m in plain.to_messages()]
        parts = to_prompt(messages).messages[1].parts
        assert "".join(part.text for part in parts) == messages[1].text


def test_no_block_is_only_whitespace() -> None:
    prompt = SpanPromptTemplate.from_messages([("human", "\n{a}\n\n{b}\n")])
    blocks = prompt.invoke({"a": DOCUMENTS, "b": [*DOCUMENTS, Document("")]}).to_messages()
    assert all(block["text"].strip() for block in blocks[0].content)  # type: ignore[index]
    assert len(spans(blocks)) == 6


def test_a_document_is_the_same_span_at_any_place() -> None:
    prompt = make("f-string")
    texts = [
        {span.text for span in spans(prompt.format_messages(context=documents, question="x"))}
        for documents in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:] + DOCUMENTS[:1])
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("template", ["f-string", "mustache"])
def test_braces_in_values_are_never_expanded(template: str) -> None:
    question = "{context} {question} {{context}} {{{question}}} {0} {}"
    messages = make(template).format_messages(context=DOCUMENTS, question=question)
    assert messages[1].text.endswith("Question: " + question)
    assert len(spans(messages)) == 3


def test_a_question_of_an_earlier_turn_is_not_expanded() -> None:
    prompt = SpanPromptTemplate.from_messages(
        [MessagesPlaceholder("history"), ("human", "{context}\n\n{question}")]
    )
    history = [HumanMessage("What is {context} or {context_str}?"), AIMessage("{question}")]
    messages = both_ways(prompt, {"history": history, "context": DOCUMENTS, "question": "x"})
    assert [message.text for message in messages[:2]] == [m.text for m in history]
    assert len(spans(messages)) == 3


def test_values_that_are_no_documents_are_formatted_as_usual() -> None:
    prompt = SpanPromptTemplate.from_messages([("human", "{a} {b:.2f} {c!r} {d}")])
    message = prompt.format_messages(a=1, b=2.0, c="x", d=["y"])[0]
    assert message.content == "1 2.00 'x' ['y']"


@pytest.mark.parametrize("value", [DOCUMENTS[0], DOCUMENTS[:1], [(DOCUMENTS[0], 0.5)]])
def test_one_document_and_documents_with_scores(value: Any) -> None:
    messages = make("f-string").format_messages(context=value, question="x")
    (span,) = spans(messages)
    assert span.text == DOCUMENTS[0].page_content
    assert span.rank == (None if isinstance(value, Document) else 0)


def test_ranked_false_gives_no_order() -> None:
    messages = make("f-string", ranked=False).format_messages(context=DOCUMENTS, question="x")
    assert [span.rank for span in spans(messages)] == [None] * 3


def test_document_prompt() -> None:
    prompt = make(
        "f-string", document_prompt=PromptTemplate.from_template("# {title}\n{page_content}")
    )
    messages = prompt.format_messages(context=DOCUMENTS[:2], question="x")
    assert spans(messages)[1].text == "# Teutberga\nTeutberga <b>& {question}</b> {{context}}"
    with pytest.raises(ValueError, match="title"):
        prompt.format_messages(context=DOCUMENTS, question="x")


@pytest.mark.parametrize("template", ["f-string", "mustache"])
def test_empty_list_is_refused_unless_allowed(template: str) -> None:
    with pytest.raises(PromptError, match="empty"):
        make(template).invoke({"context": [], "question": "x"})
    messages = make(template, allow_empty=True).format_messages(context=[], question="x")
    assert messages[1].content == "\n\nQuestion: x"


def test_bad_documents_are_refused() -> None:
    prompt = make("f-string")
    bad = Document("x")
    bad.page_content = 3  # type: ignore[assignment]
    for value, message in (
        ([*DOCUMENTS, "text"], "Element 3.*str"),
        ([DOCUMENTS[0], None], "Element 1"),
        ([(DOCUMENTS[0], "no score")], "Variable 'context': documents inside a list"),
        ([Span("a"), DOCUMENTS[0]], "Variable 'context': A list holds Documents and Spans"),
        ([bad], "page_content must be a str, not int"),
    ):
        with pytest.raises(PromptError, match=message):
            prompt.invoke({"context": value, "question": "x"})
    with pytest.raises(PromptError, match="cannot be formatted"):
        SpanPromptTemplate.from_messages([("human", "{context:.3}")]).invoke(DOCUMENTS)
    with pytest.raises(ValueError, match="whitespace"):
        make("f-string", document_separator="\n---\n")


class Hashable(Document):
    """LangChain's own cannot be in a set, nor keys of a dict."""

    def __hash__(self) -> int:
        return hash(self.page_content)


class Column:
    """A collection that is no sequence, as tables have them."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items


HASHABLE = [Hashable(document.page_content, id=document.id) for document in DOCUMENTS]
COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "deque": deque,
    "user list": UserList,
    "values": lambda items: dict(enumerate(items)).values(),
    "keys": lambda items: dict.fromkeys(items).keys(),
    "mapping view": lambda items: OrderedDict(enumerate(items)).values(),
    "array": lambda items: np.array([*items, None], dtype=object)[:-1],
    "column": lambda items: Column(items),
}


@pytest.mark.parametrize("collect", COLLECTIONS.values(), ids=COLLECTIONS)
@pytest.mark.parametrize("template", ["f-string", "mustache"])
def test_any_collection_of_documents_is_one(template: str, collect: Any) -> None:
    """In the order in which it gives them, with scores and without, to mustache's loops too."""
    prompt = make(template)
    expected = both_ways(prompt, {"context": HASHABLE, "question": "x"})
    assert both_ways(prompt, {"context": collect(HASHABLE), "question": "x"}) == expected
    if collect is not COLLECTIONS["array"]:
        scored = collect([(document, 0.5) for document in HASHABLE])
        assert both_ways(prompt, {"context": scored, "question": "x"}) == expected
        with pytest.raises(PromptError, match="Element 3"):
            prompt.invoke({"context": collect([*HASHABLE, "text"]), "question": "x"})
    loop = SpanPromptTemplate.from_messages([("human", "{{#x}}{{page_content}}{{/x}}")], "mustache")
    assert both_ways(loop, {"x": collect(HASHABLE)}) == both_ways(loop, {"x": HASHABLE})


@pytest.mark.parametrize("collect", [set, frozenset])
def test_documents_without_an_order_are_refused(collect: Any) -> None:
    for documents in (HASHABLE, HASHABLE[:1], [*HASHABLE, "text"]):
        with pytest.raises(PromptError, match=f"A {collect.__name__} of documents has no order"):
            make("f-string").invoke({"context": collect(documents), "question": "x"})


@pytest.mark.parametrize("name", ["deque", "user list", "values", "keys", "tuple"])
def test_empty_collections_are_empty_lists(name: str) -> None:
    values = {"context": COLLECTIONS[name]([]), "question": "x"}
    with pytest.raises(PromptError, match="empty"):
        make("f-string").invoke(values)
    allowed = make("f-string", allow_empty=True).invoke(values)
    assert allowed.to_messages()[1].text == "\n\nQuestion: x"


@pytest.mark.parametrize(
    "value",
    [
        "text", b"text", bytearray(b"text"), range(3), range(10**12), UserString("text"), 3, 0.5,
        ["a"], deque(["a"]), {"a": 1}.values(), {"a": 1}.items(), {"a": 1}.keys(),
        np.zeros(3), np.float32(3), np.array(3), Column([1, 2]), {"a": 1}, {"a": {"b"}}, [{"a"}],
        [["a"], ["b", ("c", 1)]], UserDict({"a": [1]}), MappingProxyType({"a": None}),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_document_is_printed_as_ever(value: Any) -> None:
    plain = ChatPromptTemplate.from_messages(F_STRING)
    values = {"context": value, "question": "x"}
    assert both_ways(make("f-string"), values) == plain.invoke(values).to_messages()


LIKE_A_DOCUMENT = {"page_content": "A text.", "metadata": {"n": 1}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "None"),
        (LIKE_A_DOCUMENT, "not a dict"),
        ([LIKE_A_DOCUMENT], "not a list of dicts"),
        (deque([LIKE_A_DOCUMENT]), "not a list of dicts"),
        ({1: LIKE_A_DOCUMENT}.values(), "not a list of dicts"),
        ((document for document in DOCUMENTS), "not as a generator"),
        (iter(DOCUMENTS), "list_iterator"),
        ({"a", "b"}, "a set has no order"),
        (frozenset(), "a frozenset has no order"),
        ([], "empty"),
        ({1: DOCUMENTS}, "documents inside a dict"),
        ([[DOCUMENTS[0], "x"]], "documents inside a list"),
        ([DOCUMENTS[0], "x"], "Element 1 of a list of documents"),
    ],
)
def test_what_was_taken_for_documents_is_refused_where_it_would_be_printed(
    value: Any, message: str
) -> None:
    """Else the model reads the word None, or Python's notation."""
    prompt = make("f-string")
    for name in ("context", "question"):
        with pytest.raises(PromptError, match=message) as caught:
            prompt.invoke({"context": "x", "question": "x", name: value})
        assert str(caught.value).startswith(f"Variable '{name}': ")
    unused = {"context": DOCUMENTS, "question": "x", "unused": value}
    assert len(spans(both_ways(prompt, unused))) == 3


NESTED: dict[str, Callable[[list[Any]], Any]] = {
    "items": lambda d: dict(enumerate(d)).items(),
    "list of lists": lambda d: [[one] for one in d],
    "dict": lambda d: dict(enumerate(d)),
    "dict of lists": lambda d: {"documents": d},
    "pairs": lambda d: [(one, "no score") for one in d],
    "other pairs": lambda d: [(0.5, one) for one in d],
    "list of dicts": lambda d: [{"title": "x", "document": one} for one in d],
    "dict of dicts": lambda d: {"a": {"b": {"c": deque(d)}}},
    "keys": lambda d: dict.fromkeys(d, "x"),
    "user dict": lambda d: UserDict(a=d),
    "proxy": lambda d: MappingProxyType({"a": d}),
    "tuple in a deque": lambda d: deque([tuple(d), "x"]),
    "set of tuples": lambda d: {(one, "x") for one in d},
    "deep": lambda d: [[[[{"a": [d]}]]]],
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("kind", [HASHABLE, [Span("a", rank=1), Span("b", rank=0)]], ids=type)
def test_documents_inside_of_other_values_are_refused_where_these_would_be_printed(
    nest: Callable[[list[Any]], Any], kind: list[Any]
) -> None:
    """Else the model reads Python's notation, and nothing is a span."""
    value = nest(kind)
    for template in ("f-string", "mustache"):
        prompt = make(template)
        with pytest.raises(PromptError, match=r"Variable 'context': documents inside a \w+ would"):
            prompt.invoke({"context": value, "question": "x"})
        unused = {"context": DOCUMENTS, "question": "x", "unused": value}
        assert len(spans(both_ways(prompt, unused))) == 3


@pytest.mark.parametrize(
    ("template_format", "template", "value"),
    [
        ("mustache", "{{x.0}}{{x.1}}", [DOCUMENTS[:1], DOCUMENTS[1:]]),
        ("mustache", "{{x.a.documents}}", {"a": {"documents": DOCUMENTS}}),
        ("mustache", "{{#x}}{{#.}}{{page_content}}{{/.}}{{/x}}", [DOCUMENTS[:1], DOCUMENTS[1:]]),
        ("mustache", "{{#x}}{{n}} {{d}}{{/x}}", [{"n": None, "d": one} for one in DOCUMENTS]),
        ("jinja2", "{% for k, d in x %}{{ d }}{% endfor %}", dict(enumerate(DOCUMENTS)).items()),
        ("jinja2", "{% for d, k in x %}{{ d }}{% endfor %}", [(one, "k") for one in DOCUMENTS]),
        ("jinja2", "{% for k in x %}{{ x[k] }}{% endfor %}", dict(enumerate(DOCUMENTS))),
    ],
)
def test_templates_may_reach_documents_inside_of_other_values(
    template_format: Any, template: str, value: Any
) -> None:
    prompt = SpanPromptTemplate.from_messages([("human", template)], template_format)
    found = spans(both_ways(prompt, {"x": value}))
    assert [span.text for span in found] == [one.page_content.rstrip() for one in DOCUMENTS]


def test_sets_may_be_looked_into() -> None:
    prompt = SpanPromptTemplate.from_messages(
        [("human", "{% if 'a' in x %}yes{% endif %}{% for i in x | sort %}{{ i }}{% endfor %}")],
        "jinja2",
    )
    assert both_ways(prompt, {"x": {"b", "a"}})[0].content == "yesab"


RANKED = [Span("first", rank=2, id="f"), Span("second"), Span("third\n", rank=0)]


@pytest.mark.parametrize("template", ["f-string", "mustache"])
@pytest.mark.parametrize("collect", [list, tuple, deque, lambda d: dict(enumerate(d)).values()])
def test_spans_are_taken_as_they_are(template: str, collect: Any) -> None:
    """In their order, with their own ranks, whatever the prompt does to documents."""
    for options in (
        {},
        {"ranked": False},
        {"document_prompt": PromptTemplate.from_template("# {title}\n{page_content}")},
    ):
        prompt = make(template, **options)
        found = spans(both_ways(prompt, {"context": collect(RANKED), "question": "x"}))
        assert found == [*RANKED[:2], Span("third", rank=0)]
        assert prompt.document_texts(RANKED) == ["first", "second", "third\n"]
    plain = make(template).invoke({"context": collect(RANKED), "question": "x"}).to_messages()[1]
    assert plain.text == "first\n\nsecond\n\nthird\n\n\nQuestion: x"


def test_one_span_and_spans_in_order_of_ids() -> None:
    prompt = make("f-string", order="id")
    assert spans(both_ways(prompt, {"context": RANKED[0], "question": "x"})) == RANKED[:1]
    mixed = [Span("b", rank=0, id="2"), Span("a", rank=1, id="1")]
    assert spans(both_ways(prompt, {"context": mixed, "question": "x"})) == mixed[::-1]
    loop = SpanPromptTemplate.from_messages([("human", "{{#x}}{{page_content}}{{/x}}")], "mustache")
    assert spans(both_ways(loop, {"x": RANKED[:2]})) == RANKED[:2]


def test_documents_ranked_by_the_question() -> None:
    """One line for documents without a useful order (docs/langchain.md)."""
    documents = [Document("Rain in Spain."), Document("The wife of Lothair was Teutberga.")]
    question = "Who was the wife of Lothair?"
    ranked = rank_spans([document.page_content for document in documents], question)
    messages = both_ways(make("f-string"), {"context": ranked, "question": question})
    assert [(span.text, span.rank) for span in spans(messages)] == [
        ("Rain in Spain.", 1),
        ("The wife of Lothair was Teutberga.", 0),
    ]
    blocks = span_blocks(ranked)
    assert [block["extras"]["minipic"]["rank"] for block in blocks] == [1, 0]


LOOPS = {
    "f-string": ["{context}", "{context!r}"],
    "mustache": [
        "{{context}}",
        "{{{context}}}",
        "{{#context}}<{{page_content}}>{{/context}}",
        "{{#context}}<{{.}}>{{/context}}",
        "{{#context}}yes{{/context}}",
        "{{^context}}none{{/context}}",
        "{{context.page_content}}",
        "{{context.0}}",
    ],
    "jinja2": [
        "{{ context }}",
        "{{ context[0] }}",
        "{{ context.page_content }}",
        "{% for d in context %}{{ d.page_content }}{% endfor %}",
        "{% for d in context %}{% else %}none{% endfor %}",
        "{% if context %}yes{% else %}none{% endif %}",
        "{{ context | length }}",
        "{{ context | join }}",
        "{{ context | map(attribute='page_content') | join }}",
        "{{ context | first }}",
        "{{ context | tojson }}",
    ],
}


async def in_turn() -> Any:
    for document in DOCUMENTS:
        yield document


@pytest.mark.parametrize(
    ("template_format", "template"),
    [(kind, template) for kind, templates in LOOPS.items() for template in templates],
)
@pytest.mark.parametrize("nested", [False, True])
def test_refused_documents_are_refused_however_a_template_uses_them(
    template_format: Any, template: str, nested: bool
) -> None:
    """A loop over them must not pass for one over nothing."""
    nested = nested and template_format != "f-string"  # which knows no dots
    if nested:
        template = template.replace("context", "user.context")
    prompt = SpanPromptTemplate.from_messages([("human", template)], template_format)
    refused: list[Any] = [
        (document for document in DOCUMENTS),
        iter(DOCUMENTS),
        map(str, DOCUMENTS),
        in_turn(),
        [],
        [*DOCUMENTS, "text"],
        [DOCUMENTS[0], None],
    ]
    for value in refused:
        given: dict[str, Any] = {"user": {"context": value}} if nested else {"context": value}
        with pytest.raises(TypeError if "tojson" in template else PromptError):
            prompt.invoke(given)


@pytest.mark.parametrize(
    ("template_format", "template"),
    [
        ("mustache", "{{#context}}{{page_content}}{{/context}}{{^context}}none{{/context}}"),
        ("jinja2", "{% for d in context %}{{ d.page_content }}{% else %}none{% endfor %}"),
        ("jinja2", "{% if context %}{{ context[0].page_content }}{% else %}none{% endif %}"),
    ],
)
def test_templates_may_see_that_an_allowed_list_is_empty(
    template_format: Any, template: str
) -> None:
    prompt = SpanPromptTemplate.from_messages(
        [("human", template)], template_format, allow_empty=True
    )
    assert prompt.format_messages(context=[])[0].content == "none"
    (message,) = prompt.format_messages(context=DOCUMENTS[:1])
    assert message.text == DOCUMENTS[0].page_content


@pytest.mark.parametrize(
    "test",
    [
        "x is none",
        "a.x is none",
        "x is not none and 0 or not x",
        "x is sameas none",
        "a.x == none",
        "none == x",
        "not x",
        "x is not iterable",
    ],
)
def test_none_is_none_to_jinja2(test: str) -> None:
    template = "{% if " + test + " %}none{% else %}some{% endif %}"
    prompt = SpanPromptTemplate.from_messages([("human", template)], "jinja2")
    for value, expected in ((None, "none"), ("text", "some")):
        message = both_ways(prompt, {"x": value, "a": {"x": value}})[0]
        assert message.content == expected
    alias = "{% set x = y %}" + template.replace("a.x", "x")
    prompt = SpanPromptTemplate.from_messages([("human", alias)], "jinja2")
    assert both_ways(prompt, {"y": None})[0].content == "none"


def test_none_is_refused_where_jinja2_would_print_it() -> None:
    for template in ("{{ x }}", "{{ 'a' ~ x }}", "{{ x }}{% if y is none %}{% endif %}"):
        prompt = SpanPromptTemplate.from_messages([("human", template)], "jinja2")
        with pytest.raises(PromptError, match="None"):
            prompt.invoke({"x": None, "y": None})
    loop = SpanPromptTemplate.from_messages(
        [("human", "{% for d in x %}{{ d }}{% endfor %}")], "jinja2"
    )
    with pytest.raises(TypeError, match="None"):
        loop.invoke({"x": None})


def test_what_is_inside_of_such_values_may_be_printed() -> None:
    mustache = SpanPromptTemplate.from_messages(
        [("human", "<{{none}}{{#none}}x{{/none}}{{a.metadata.n}}{{#b}}{{page_content}}{{/b}}>")],
        template_format="mustache",
    )
    message = mustache.format_messages(none=None, a=LIKE_A_DOCUMENT, b=[LIKE_A_DOCUMENT])[0]
    assert message.content == "<1A text.>"


def test_values_that_the_template_does_not_use_are_left_alone() -> None:
    values = {"context": DOCUMENTS, "question": "x", "unused": [], "mixed": [DOCUMENTS[0], 3]}
    assert len(spans(both_ways(make("f-string"), values))) == 3


def test_mustache_sections_and_nesting() -> None:
    template = (
        "{{#context}}<{{title}}>{{page_content}}</>\n{{/context}}{{^context}}none{{/context}}"
        "{{user.notes}}"
    )
    prompt = SpanPromptTemplate.from_messages([("human", template)], "mustache", allow_empty=True)
    values = {"context": DOCUMENTS[:2], "user": {"notes": DOCUMENTS[2:]}}
    message = prompt.format_messages(**values)[0]
    assert [span.text for span in spans([message])] == [
        document.page_content.rstrip() for document in DOCUMENTS
    ]
    assert message.text.startswith("<Lothair>Lothair II was a king.</>\n<Teutberga>")
    empty = prompt.format_messages(context=[], user={"notes": "-"})[0]
    assert empty.content == "none-"


def test_list_content_and_blocks_marked_by_hand() -> None:
    marked = {"type": "text", "text": "Rules: {rules}", "extras": {"minipic": {"span": True}}}
    prompt = SpanPromptTemplate.from_messages(
        [("human", [{"type": "text", "text": "{context}\n"}, marked, "{question}"])]
    )
    values = {"context": DOCUMENTS[:2], "rules": DOCUMENTS[:1], "question": "x"}
    message = both_ways(prompt, values)[0]
    assert [span.text for span in spans([message])] == [
        *(document.page_content for document in DOCUMENTS[:2]),
        "Rules: Lothair II was a king.",
    ]


def test_documents_in_an_image_are_refused() -> None:
    prompt = SpanPromptTemplate.from_messages(
        [("human", [{"type": "image_url", "image_url": "{context}"}])]
    )
    with pytest.raises(PromptError, match="image_url"):
        prompt.invoke({"context": DOCUMENTS})


def test_documents_in_a_system_message() -> None:
    prompt = SpanPromptTemplate.from_messages([("system", "Use:\n{context}"), ("human", "{q}")])
    messages = both_ways(prompt, {"context": DOCUMENTS, "q": "x"})
    assert isinstance(messages[0], SystemMessage)
    assert len(spans(messages)) == 3


HUMAN = [("human", "{context}\n\n{question}")]
VALUES = {"context": DOCUMENTS, "question": "Who?", "history": [], "extra": "more"}


@pytest.mark.parametrize(
    "prompt",
    [
        SpanPromptTemplate.from_template(HUMAN[0][1]),
        SpanPromptTemplate.from_messages(HUMAN).partial(question="Who?"),
        SpanPromptTemplate.from_messages(HUMAN).partial(context=DOCUMENTS),
        SpanPromptTemplate.from_messages(HUMAN).partial(context=lambda: DOCUMENTS),
        SpanPromptTemplate.from_messages(HUMAN) + "{extra}",
        SpanPromptTemplate.from_messages(HUMAN) + AIMessage("Well."),
        operator.add(SpanPromptTemplate.from_messages(HUMAN), [("human", "{extra}")]),
        SpanPromptTemplate([]) + HUMAN[0][1],
        SpanPromptTemplate([("system", "x")]) + ChatPromptTemplate(HUMAN),
        ChatPromptTemplate([("system", "x")]) + SpanPromptTemplate(HUMAN),
        SystemMessage("x") + SpanPromptTemplate(HUMAN),
        ChatPromptTemplate([("system", "x"), SpanPromptTemplate(HUMAN)]),
        SpanPromptTemplate([("system", "x"), ChatPromptTemplate(HUMAN)]),
        SpanPromptTemplate([("system", "{extra}"), MessagesPlaceholder("history"), *HUMAN])[1:],
        SpanPromptTemplate([("placeholder", "{history}"), *HUMAN]).partial(question="Who?")[1:],
        SpanPromptTemplate([HumanMessagePromptTemplate.from_template(HUMAN[0][1])]),
    ],
)
def test_marks_survive_whatever_is_done_to_a_template(prompt: ChatPromptTemplate) -> None:
    names = {*prompt.input_variables, *prompt.optional_variables}
    messages = both_ways(prompt, {name: VALUES[name] for name in names})
    assert [span.text for span in spans(messages)] == [
        document.page_content.rstrip() for document in DOCUMENTS
    ]


def test_combining_keeps_type_options_and_partials() -> None:
    prompt = make("f-string", ranked=False).partial(question="Who?")
    for other in (prompt + "more", prompt[:], prompt[1:], prompt.partial(context="x")):
        assert isinstance(other, SpanPromptTemplate)
        assert other.ranked is False
        assert other.partial_variables["question"] == "Who?"
    assert prompt[0].format_messages()[0].content == "Answer."  # type: ignore[union-attr]
    prompt.append("{more}")
    prompt.extend([("human", "{most}")])
    assert all(isinstance(m, SpanHumanMessagePromptTemplate) for m in prompt.messages[1:])
    assert len(prompt) == 4


def test_options_given_anew_and_options_of_others() -> None:
    plain = make("f-string")
    titled = SpanPromptTemplate(
        plain.messages, document_prompt=PromptTemplate.from_template("{title}")
    )
    values = {"context": DOCUMENTS[:1], "question": "x"}
    texts = [spans(prompt.format_messages(**values))[0].text for prompt in (titled, plain)]
    assert texts == ["Lothair", "Lothair II was a king."]
    both = SpanPromptTemplate([("human", "{context}")]) + titled.partial(question="x")
    for prompt in (both, both.partial(more="x"), both[:], ChatPromptTemplate([both])):
        found = spans(prompt.format_messages(context=DOCUMENTS[:1]))
        assert [span.text for span in found] == texts[::-1]
    assert (ChatPromptTemplate([("system", "x")]) + titled).format_messages(**values)
    inner = PromptTemplate.from_template("- {page_content}")
    nested = SpanPromptTemplate([titled], document_prompt=inner)
    assert spans(nested.format_messages(**values))[0].text == "- Lothair II was a king."
    assert SpanPromptTemplate([titled]).document_texts(DOCUMENTS[:1]) == ["Lothair"]


def test_partials_inside_a_message_template() -> None:
    message = HumanMessagePromptTemplate.from_template(
        HUMAN[0][1], partial_variables={"context": DOCUMENTS}
    )
    prompt = SpanPromptTemplate([message])
    assert prompt.input_variables == ["question"]
    assert len(spans(prompt.format_messages(question="x"))) == 3


def test_a_single_variable_needs_no_dict() -> None:
    prompt = SpanPromptTemplate.from_messages([("human", "{context}")])
    assert len(spans(prompt.invoke(DOCUMENTS).to_messages())) == 3  # type: ignore[arg-type]


def test_input_schema_allows_documents() -> None:
    prompt = SpanPromptTemplate([MessagesPlaceholder("history", optional=True), *HUMAN])
    schema = prompt.get_input_schema()
    schema(context=DOCUMENTS, question="x")
    schema(context="text", question="x")
    assert set(prompt.get_input_jsonschema()["required"]) == {"context", "question"}
    assert "history" in schema.model_fields


@pytest.mark.parametrize("template", ["f-string", "mustache"])
@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_dump_and_load(template: str) -> None:
    prompt = make(template, document_prompt=PromptTemplate.from_template("{page_content}!"))
    assert type(prompt).get_lc_namespace() == ["langchain_minipic", "prompts"]
    ours = [getattr(prompts, name) for name in prompts.__all__]
    again = load(
        dumpd(prompt),
        allowed_objects=[*ours, PromptTemplate],
        valid_namespaces=["langchain_minipic"],
    )
    assert isinstance(again, SpanPromptTemplate)
    values = {"context": DOCUMENTS, "question": "x"}
    assert again.invoke(values) == prompt.invoke(values)
    assert load(dumpd(prompt.invoke(values)), allowed_objects="all") == prompt.invoke(values)


def test_frame_ends_where_documents_begin() -> None:
    prompt = make("f-string", document_prompt=PromptTemplate.from_template("{title}{page_content}"))
    messages = prompt.frame().to_messages()
    assert messages[0].content == "Answer."
    assert to_prompt(messages).messages[1].parts[0] == Span("xdocument", id="context")
    nested = SpanPromptTemplate([ChatPromptTemplate([MessagesPlaceholder("history"), *HUMAN])])
    assert len(nested.frame().to_messages()) == 1


def test_pretty_repr_and_format() -> None:
    prompt = make("f-string")
    assert "{context}" in prompt.pretty_repr()
    assert prompt.format(context=DOCUMENTS[:1], question="x").endswith(
        "Human: Lothair II was a king.\n\nQuestion: x"
    )


def test_plus_is_not_limited_to_templates() -> None:
    with pytest.raises(NotImplementedError):
        operator.add(make("f-string"), 3)


CHANGES = ["tojson", "upper", "truncate(7)", "truncate(9, true)"]
HARMLESS = ["trim", "urlize", "replace('\\n', ' ')", "truncate"]


@pytest.mark.parametrize("what", ["context", "context[0]", "context[0].page_content"])
@pytest.mark.parametrize("change", [*CHANGES, *HARMLESS])
def test_documents_are_never_lost_by_a_filter(what: str, change: str) -> None:
    """It is given what stands for them: they come through whole, or not at all."""
    documents = [Document(page_content="An eel."), Document(page_content="A bee.")]
    template = f"{{{{ {what} | {change} }}}}\nWhich?"
    prompt = SpanPromptTemplate.from_messages([("human", template)], "jinja2")
    # `truncate` leaves alone what has few items.
    if change in CHANGES and (what.endswith("content") or "truncate" not in change):
        with pytest.raises(PromptError, match="filter"):
            prompt.invoke({"context": documents})
        return
    (message,) = prompt.invoke({"context": documents}).to_messages()
    assert "An eel." in [block["text"].strip() for block in message.content]
