"""`minipic_backend.Prompt`s, those of schemas among them, where LangChain's prompts go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_minipic import ChatMiniPIC, MiniPIC
from langchain_minipic.messages import to_prompt

from minipic_backend import Message, Prompt, PromptError, Span, Text
from minipic_backend.patterns import few_shot
from minipic_backend.prompt_cache import Module, Parameter, Schema, SchemaPrompt, Union
from minipic_backend.testing import FakeEngine

SCHEMA = Schema(
    "trip",
    [
        "Read this first. ",
        Module("plan", ["A trip of ", Parameter("days", 4), Parameter("who", 3, "two"), " days. "]),
        Union([Module("miami", "Miami has beaches."), Module("paris", "Paris has museums.")]),
    ],
    system="You plan trips.",
    scaffolds=[["plan", "miami"]],
)
MODULES: dict[str, dict[str, str]] = {"plan": {"days": "three"}, "miami": {}}
PROMPT = SCHEMA.prompt("Where to surf?", MODULES)
RAW = SCHEMA.prompt("Where to surf?", MODULES, chat=False)
WAYS: list[Callable[[Any, Any], Any]] = [
    lambda chain, value: chain.invoke(value),
    lambda chain, value: list(chain.stream(value)),
    lambda chain, value: chain.batch([value, value]),
    lambda chain, value: asyncio.run(chain.ainvoke(value)),
    lambda chain, value: asyncio.run(chain.abatch([value])),
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize(("kind", "prompt"), [(ChatMiniPIC, PROMPT), (MiniPIC, RAW)])
def test_a_schemas_prompt_reaches_the_engine(
    engine: FakeEngine, kind: Any, prompt: Prompt, ask: Any
) -> None:
    llm = kind(model="m", engine=engine, technique="prompt_cache")
    ask(llm, prompt)
    ask(RunnableLambda(lambda _: prompt) | llm, "x")
    assert len(engine.prompts) >= 2
    for given in engine.prompts:
        assert isinstance(given, SchemaPrompt)
        assert given == prompt
        assert given.schema == SCHEMA
        assert given.arguments == PROMPT.arguments
    assert (
        llm.explain(prompt).token_ids == engine.explain(prompt, technique="prompt_cache").token_ids
    )


def test_with_tools_and_variables_of_the_template(engine: FakeEngine) -> None:
    llm = ChatMiniPIC(model="m", engine=engine, chat_template_kwargs={"enable_thinking": False})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    llm.bind_tools([tool]).invoke(PROMPT)
    (given,) = engine.prompts
    assert isinstance(given, SchemaPrompt)
    assert [one["function"]["name"] for one in given.frame().tools] == ["f"]
    assert given.frame().template_kwargs == {"enable_thinking": False}


def test_messages_survive_dump_and_load_and_read_as_text(engine: FakeEngine) -> None:
    messages = ChatMiniPIC(model="m", engine=engine)._convert_input(PROMPT).to_messages()
    again = [loads(dumps(message), allowed_objects="core") for message in messages]
    assert to_prompt(again) == PROMPT
    assert "".join(str(one.text) for one in messages) == "".join(
        part.text for message in PROMPT.messages for part in message.parts
    )


def test_a_chat_that_goes_on_is_an_ordinary_prompt(engine: FakeEngine) -> None:
    """Nothing but a schema's own prompt has positions reserved; its modules stay spans."""
    messages = ChatMiniPIC(model="m", engine=engine)._convert_input(PROMPT).to_messages()
    prompt = to_prompt([*messages, AIMessage("There."), HumanMessage("And then?")])
    assert not isinstance(prompt, SchemaPrompt)
    assert len(prompt.spans) == len(PROMPT.spans)
    changed = messages[-1].model_copy(update={"content": [*messages[-1].content, "More."]})
    assert not isinstance(to_prompt([*messages[:-1], changed]), SchemaPrompt)


def test_any_prompt(engine: FakeEngine) -> None:
    chat = ChatMiniPIC(model="m", engine=engine)
    prompts = [
        few_shot("Do as shown.", [("1 + 1", "2"), ("2 + 2", "4")], "3 + 3"),
        Prompt.chat(
            [
                Message("system", "Be brief."),
                Message("user", [Span("A text.", rank=0, id="a"), Text("Who?")]),
                Message("assistant", "She."),
                Message("developer", "Go on."),
                Message("user", "When?"),
            ]
        ),
    ]
    for prompt in prompts:
        chat.invoke(prompt)
        assert engine.prompts[-1] == prompt
    raw = Prompt([Text("Say: "), Span("A text."), Text("Now.")])
    MiniPIC(model="m", engine=engine).invoke(raw)
    assert engine.prompts[-1] == raw


DOC = "\n\nLothair II was a king.\n"
CHATS = [
    Prompt.chat([Message("user", [Text("Look: "), Span(DOC), Text("Who?")])]),
    Prompt.chat(
        [
            Message("system", "Be brief."),
            Message("system", "Be kind."),
            Message("user", [Span(DOC), Text("Who?")]),
        ]
    ),
    Prompt.chat(
        [
            Message("user", "First."),
            Message("user", [Span(""), Span(" \n"), Span(DOC)]),
            Message("human", "Who?"),
        ]
    ),
    Prompt.chat([Message("human", "a"), Message("ai", "b"), Message("user", [Span(DOC), "c"])]),
    Prompt.chat([Message("developer", "a"), Message("user", [Span(DOC, rank=1, id="d"), "Who?"])]),
    PROMPT,
]
RAWS = [
    Prompt([Text("Say: "), Text("now. "), Span(DOC), Text("Who?")]),
    Prompt([Text("Say: "), Span(" "), Span(DOC, rank=0), Text("Who?")]),
    RAW,
]
EVERY = [(ChatMiniPIC, prompt) for prompt in CHATS] + [(MiniPIC, prompt) for prompt in RAWS]


@pytest.mark.parametrize(("kind", "prompt"), EVERY)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_every_method_sees_the_prompt_that_invoke_sends(
    kind: Any, prompt: Prompt, variables: dict[str, Any]
) -> None:
    engine = FakeEngine(late=0)
    llm = kind(model="m", engine=engine)
    if kind is ChatMiniPIC:
        llm.chat_template_kwargs = variables
        sent = to_prompt(llm._convert_input(prompt).to_messages(), template_kwargs=variables)
    else:
        sent = llm._convert_input(prompt).prompt
    assert llm._to_prompt(prompt) == sent
    llm.invoke(prompt)
    llm.compare(prompt, ["full", "primed"])
    assert engine.prompts == [sent] * len(engine.prompts)
    assert llm.explain(prompt) == engine.explain(sent)
    given = prompt.messages[-1].parts if prompt.is_chat else prompt.parts
    text = "".join(part.text for part in given)
    kept = sent.messages[-1].parts if sent.is_chat else sent.parts
    assert "".join(part.text for part in kept).endswith(text.strip())


@pytest.mark.parametrize(
    ("kind", "prompt"), [one for one in EVERY if one[1] is not PROMPT and one[1] is not RAW]
)
@pytest.mark.parametrize("frame", ["prefix", "none", "universal"])
def test_what_was_warmed_is_a_hit(kind: Any, prompt: Prompt, frame: str) -> None:
    engine = FakeEngine(technique="primed", frame=frame, late=0)
    llm = kind(model="m", engine=engine)
    report = llm.warm([DOC], prompt)
    assert report.num_spans == 1
    rows = llm.explain(prompt).rows
    assert [row.state for row in rows if row.kind == "span"] == ["warm"]
    llm.invoke(prompt)
    assert llm.warm([DOC], prompt).num_computed_tokens == 0


@pytest.mark.parametrize("text", ["", " ", "?"])
def test_a_blank_span_says_where_documents_will_stand(text: str) -> None:
    def chat(document: str) -> Prompt:
        parts = [Text("Look: "), Span(document), Text("Who?")]
        return Prompt.chat([Message("system", "a"), Message("system", "b"), Message("user", parts)])

    document = DOC.lstrip()
    llm = ChatMiniPIC(model="m", engine=FakeEngine(late=0))
    llm.warm([document], chat(text))
    assert [row.state for row in llm.explain(chat(document)).rows if row.kind == "span"] == ["warm"]
    raw = MiniPIC(model="m", engine=FakeEngine(late=0))
    raw.warm([document], Prompt([Text("Look: "), Span(text), Text("Who?")]))
    value = Prompt([Text("Look: "), Span(document), Text("Who?")])
    assert [row.state for row in raw.explain(value).rows if row.kind == "span"] == ["warm"]


def test_tools_of_a_prompt_stay_in_what_is_warmed() -> None:
    """A chat with tools is sent by `bind_tools`; it can be warmed as a Prompt."""
    engine = FakeEngine(late=0)
    llm = ChatMiniPIC(model="m", engine=engine)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    prompt = Prompt.chat(CHATS[1].messages, tools=[tool], template_kwargs={"a": 1})
    seen = llm._to_prompt(prompt)
    assert (list(seen.tools), seen.template_kwargs) == ([tool], {"a": 1})
    assert llm.warm([DOC], prompt).num_spans == 1


@pytest.mark.parametrize(
    ("kind", "prompt", "message"),
    [
        (ChatMiniPIC, RAW, "text model"),
        (MiniPIC, PROMPT, "chat model"),
        (ChatMiniPIC, Prompt.chat([Message("user", "x")], tools=[{"a": 1}]), "bind_tools"),
        (ChatMiniPIC, Prompt.chat([Message("tool", "x", {"tool_call_id": "1"})]), "tool_call_id"),
    ],
)
def test_what_cannot_be_said_is_refused(
    engine: FakeEngine, kind: Any, prompt: Prompt, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        kind(model="m", engine=engine).invoke(prompt)


def test_a_wrong_schema_in_a_message_is_refused() -> None:
    block = {"type": "text", "text": "x", "extras": {"minipic": {"span": False, "schema": {}}}}
    with pytest.raises(PromptError, match="schema"):
        to_prompt([HumanMessage([block])])


@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC])
def test_caches_tell_prompts_of_one_text_apart(kind: Any) -> None:
    """LangChain keys its caches by text: spans and schemas are more than that."""
    is_chat = kind is ChatMiniPIC
    other = Schema("trip", SCHEMA.children, SCHEMA.system)  # computed apart: no scaffold
    variants: list[Any] = [
        SCHEMA.prompt("Where?", MODULES, chat=is_chat),
        other.prompt("Where?", MODULES, chat=is_chat),
    ]
    parts = [Span("A text."), Text("Who?")]
    variants += [Prompt.chat([Message("user", parts)]) if is_chat else Prompt(parts)]
    variants += ["A text.Who?"]
    engine = FakeEngine([str(place) for place in range(9)])
    llm = kind(model="m", engine=engine, cache=InMemoryCache())
    answers = [llm.invoke(variant) for variant in variants]
    texts = [getattr(answer, "content", answer) for answer in answers]
    assert texts == ["0", "1", "2", "3"]
    again = [llm.invoke(variant) for variant in variants]
    assert [getattr(answer, "content", answer) for answer in again] == texts
