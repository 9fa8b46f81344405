"""Tools and reasoning: choices, what decoding is held to, and reading answers piece by piece."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipic_backend import AnswerError, ConfigurationError, Message, Prompt, Span
from minipic_backend.tools import (
    Answer,
    AnswerFormat,
    AnswerParser,
    plan_answer,
    resolve_tool_choice,
    spell_out_tools,
)
from minipic_backend.tools.syntax import REASONING_TAGS, TOOL_SYNTAXES, find_tool_syntax

THINK = REASONING_TAGS["think"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
NOW = tool("now")


def ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"id{next(counter)}"


def read(format: AnswerFormat, *pieces: str) -> Answer:
    parser = AnswerParser(format, ids())
    return Answer.join([*map(parser.feed, pieces), parser.finish()])


def calls(answer: Answer) -> list[tuple[str, str, Any]]:
    return [(call.id, call.name, call.parse_arguments()) for call in answer.tool_calls]


ONE = [("id0", "add", {"a": 1, "b": 2})]
TWO = [*ONE, ("id1", "now", {})]
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CASES: list[tuple[str, str, str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{ADD_JSON}\n</tool_call>", "", "", ONE),
    ("hermes", f"Sure.\n\n<tool_call>{ADD_JSON}</tool_call>", "Sure.", "", ONE),
    (
        "hermes",
        f'<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n',
        "",
        "",
        TWO,
    ),
    ("hermes", f"<tool_call>{ADD_JSON}", "", "", ONE),
    ("hermes", f"<tool_call>{ADD_JSON}</tool_call> Done.", "Done.", "", ONE),
    ("hermes", "a < b, <tool> and { } too. ", "a < b, <tool> and { } too. ", "", []),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", "", []),
    (
        "hermes",
        '<tool_call>{"no": "name"}</tool_call>',
        '<tool_call>{"no": "name"}</tool_call>',
        "",
        [],
    ),
    ("hermes", "ends in a beginning <tool_c", "ends in a beginning <tool_c", "", []),
    ("hermes", "<think>\nWell…\n</think>\n\nYes.", "Yes.", "Well…", []),
    ("hermes", f"<think>Add.</think>\n<tool_call>{ADD_JSON}</tool_call>", "", "Add.", ONE),
    ("hermes", "<think>cut off", "", "cut off", []),
    (
        "hermes",
        '<tool_call>{"arguments": "{\\"a\\": 1, \\"b\\": 2}", "name": "add"}</tool_call>',
        "",
        "",
        ONE,
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>',
        "",
        "",
        ONE,
    ),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", "", ONE),
    ("llama3_json", f'<|python_tag|>{ADD_JSON}; {{"name": "now"}}', "", "", TWO),
    ("llama3_json", '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', "", []),
    ("llama3_json", "Just text {} here", "Just text {} here", "", []),
    ("mistral", f'[TOOL_CALLS] [{ADD_JSON}, {{"name": "now", "arguments": {{}}}}]', "", "", TWO),
    ("json", f'[{ADD_JSON}, {{"name": "now", "arguments": {{}}}}]', "", "", TWO),
    ("json", "[1, 2]", "[1, 2]", "", []),
]


@pytest.mark.parametrize(("syntax", "text", "content", "reasoning", "expected"), CASES)
def test_answers_are_read_whole_and_in_any_pieces(
    syntax: str, text: str, content: str, reasoning: str, expected: list[Any]
) -> None:
    format = AnswerFormat(TOOL_SYNTAXES[syntax], frozenset({"add", "now"}), reasoning=THINK)
    whole = read(format, text)
    assert (whole.content, whole.reasoning, calls(whole)) == (content, reasoning, expected)
    assert read(format, *text) == whole
    for size in (2, 3, 7):
        assert read(format, *(text[i : i + size] for i in range(0, len(text), size))) == whole


@given(st.text('<tool_cal>/{}[]":, namergu1\\\n', max_size=60), st.integers(1, 9))
def test_pieces_never_change_what_is_read(text: str, size: int) -> None:
    for syntax in ("hermes", "llama3_json"):
        format = AnswerFormat(TOOL_SYNTAXES[syntax], frozenset({"name"}), reasoning=THINK)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(format, *pieces) == read(format, text)


@given(st.text(max_size=40))
def test_text_without_tools_is_left_alone(text: str) -> None:
    assert read(AnswerFormat(), text) == Answer(text)


def test_arguments_are_streamed() -> None:
    parser = AnswerParser(AnswerFormat(TOOL_SYNTAXES["hermes"]), ids())
    (first,) = parser.feed('<tool_call>{"name": "add", "arguments": {"a"').tool_calls
    assert (first.id, first.name, first.arguments) == ("id0", "add", '{"a"')
    (second,) = parser.feed(": 1}").tool_calls
    assert (second.id, second.name, second.arguments) == (None, None, ": 1}")


def test_reasoning_that_the_prompt_began() -> None:
    format = AnswerFormat(reasoning=THINK, reasoning_open=True)
    assert read(format, "Hm.\n</think>\nYes.") == Answer("Yes.", "Hm.")


def test_the_arguments_of_a_forced_tool() -> None:
    format = AnswerFormat(TOOL_SYNTAXES["json"], only_arguments_of="add")
    assert calls(read(format, '{"a": 1', ', "b": 2}')) == ONE
    with pytest.raises(AnswerError, match="no JSON"):
        read(format, '{"a": 1').tool_calls[0].parse_arguments()


@pytest.mark.parametrize(
    ("choice", "tools", "mode", "name"),
    [
        (None, [], "none", None),
        (None, [ADD], "auto", None),
        ("auto", [ADD], "auto", None),
        ("none", [ADD], "none", None),
        ("any", [ADD, NOW], "required", None),
        ("required", [ADD, NOW], "required", None),
        (True, [ADD, NOW], "required", None),
        ("any", [ADD], "named", "add"),
        ("now", [ADD, NOW], "named", "now"),
        ({"type": "function", "function": {"name": "now"}}, [ADD, NOW], "named", "now"),
    ],
)
def test_choices(choice: Any, tools: list[Any], mode: str, name: str | None) -> None:
    resolved = resolve_tool_choice(choice, tools)
    assert (resolved.mode, resolved.name) == (mode, name)


@pytest.mark.parametrize(
    ("choice", "tools", "match"),
    [
        ("sub", [ADD], "add"),
        ("any", [], "without tools"),
        (None, [{"name": "add"}], "A tool is"),
    ],
)
def test_wrong_choices_are_refused(choice: Any, tools: list[Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        resolve_tool_choice(choice, tools)


def held_to(tool_parser: str, **options: Any) -> Any:
    return plan_answer(None, tool_parser=tool_parser, **options).options["structured_outputs"]


def test_forced_answers_are_held_to_a_schema() -> None:
    """Where we cannot write the model's own syntax."""
    import jsonschema

    def schema(**options: Any) -> Any:
        return held_to("mistral", tool_choice="any", **options)["json"]

    jsonschema.validate({"a": 1, "b": 2}, schema(tools=[ADD]))
    required = schema(tools=[ADD, NOW])
    jsonschema.validate(json.loads(f"[{ADD_JSON}, {ADD_JSON}]"), required)
    single = schema(tools=[ADD, NOW], parallel=False)
    for wrong, against in (
        ([], required),
        ([{"name": "add", "arguments": {}}], required),
        ([{"name": "now", "arguments": {"x": 1}}], required),
        (json.loads(f"[{ADD_JSON}, {ADD_JSON}]"), single),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, against)


HERMES_ADD = f"<tool_call>\n{ADD_JSON}\n</tool_call>"
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"tools": [ADD]}, HERMES_ADD, '{"a": 1, "b": 2}'),
        ({"tools": [ADD, NOW]}, f"{HERMES_ADD}\n{HERMES_NOW}", "Well, "),
        ({"tools": [ADD, NOW], "parallel": False}, HERMES_NOW, f"{HERMES_NOW}\n{HERMES_ADD}"),
        ({"tools": [NOW]}, HERMES_NOW, HERMES_NOW.replace("{}", '{"x": 1}')),
    ],
)
def test_forced_answers_are_held_to_the_models_own_syntax(
    smollm2_tokenizer: Any, options: dict[str, Any], good: str, bad: str
) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    plan = plan_answer(smollm2_tokenizer, tool_choice="any", **options)
    tag = plan.options["structured_outputs"]["structural_tag"]
    info = xgrammar.TokenizerInfo.from_huggingface(smollm2_tokenizer)
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    assert matcher.accept_string(good)
    assert not xgrammar.GrammarMatcher(grammar).accept_string(bad)
    answer = plan.parser().parse(good)
    assert [f'"name": "{call.name}"' in good for call in answer.tool_calls] == [True] * good.count(
        "name"
    )


def test_strict_holds_calls_of_the_models_own_accord(smollm2_tokenizer: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    plan = plan_answer(smollm2_tokenizer, tools=[ADD, NOW], strict=True)
    tag = plan.options["structured_outputs"]["structural_tag"]
    info = xgrammar.TokenizerInfo.from_huggingface(smollm2_tokenizer)
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    for good in ("Just text.", HERMES_ADD, f"Wait. {HERMES_ADD}\n{HERMES_NOW}"):
        assert xgrammar.GrammarMatcher(grammar).accept_string(good)
    for bad in (HERMES_ADD.replace("add", "sub"), HERMES_ADD.replace("1", '"one"')):
        assert not xgrammar.GrammarMatcher(grammar).accept_string(bad)
    assert "structured_outputs" not in plan_answer(smollm2_tokenizer, tools=[ADD]).options


def test_tags_that_are_special_tokens_stay_in_the_answer() -> None:
    class Token:
        content, special = "<tool_call>", True

    class Tokenizer:
        chat_template = "{{ tools }} <tool_call>"
        added_tokens_decoder: ClassVar = {7: Token()}

    for choice in ("auto", "any"):
        plan = plan_answer(Tokenizer(), tools=[ADD], tool_choice=choice)  # type: ignore[arg-type]
        assert plan.options["skip_special_tokens"] is False


def test_shared_definitions_move_to_the_top() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}

    def with_point(name: str, definition: Any) -> dict[str, Any]:
        made = tool(name, at={"$ref": "#/$defs/Point"})
        made["function"]["parameters"]["$defs"] = {"Point": definition}
        return made

    tools = [with_point("a", point), with_point("b", point)]
    assert held_to("mistral", tools=tools, tool_choice="any")["json"]["$defs"] == {"Point": point}
    assert tools[0]["function"]["parameters"]["$defs"]  # the caller's stays as it was
    other = [tools[0], with_point("b", {"type": "null"})]
    with pytest.raises(ConfigurationError, match="Point"):
        held_to("mistral", tools=other, tool_choice="any")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|> ipython", "llama3_json"),
        ("{{ tools }} <tool_call> <function=", "qwen3_coder"),
    ],
)
def test_the_template_tells_the_family(template: str, name: str) -> None:
    assert find_tool_syntax(template) == name


def test_unknown_parsers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="think"):
        plan_answer(None, reasoning_parser="thought")
    plan = plan_answer(None, tools=[ADD], tool_parser="no_such_parser")
    with pytest.raises(ConfigurationError, match="no_such_parser"):
        plan.parser()


def test_a_parser_of_vllms(smollm2_tokenizer: Any) -> None:
    """As for the families whose calls are not JSON: whole and streamed."""
    plan = plan_answer(smollm2_tokenizer, tools=[ADD, NOW], tool_parser="pythonic")
    text = "[add(a=1, b=2), now()]"
    whole = plan.parser().parse(text)
    assert [(c.name, c.parse_arguments()) for c in whole.tool_calls] == [c[1:] for c in TWO]
    parser = plan.parser()
    pieces = [parser.feed(text[i : i + 4]) for i in range(0, len(text), 4)]
    streamed = Answer.join([*pieces, parser.finish()])
    assert [(c.name, c.parse_arguments()) for c in streamed.tool_calls] == [c[1:] for c in TWO]
    assert plan.options == {"skip_special_tokens": False}


CHAT = Prompt.chat(
    [
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message(
            "assistant",
            "",
            {
                "tool_calls": [
                    {
                        "id": "x",
                        "type": "function",
                        "function": {"name": "add", "arguments": {"a": 1}},
                    }
                ]
            },
        ),
        Message("tool", [Span("A document.")], {"tool_call_id": "x", "name": "add"}),
        Message("tool", "3", {"tool_call_id": "y"}),
        Message("user", "And?"),
    ],
    tools=[ADD],
)


def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    spelled = spell_out_tools(CHAT, "{% for message in messages %}…")
    assert [message.role for message in spelled.messages] == ["system", "user", "assistant", "user"]
    texts = ["".join(part.text for part in message.parts) for message in spelled.messages]
    assert texts[0].startswith("Be brief.\n\n# Tools")
    assert json.dumps(ADD) in texts[0]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in texts[2]
    assert texts[3] == (
        "<tool_response>\nA document.\n</tool_response>\n<tool_response>\n3\n</tool_response>\nAnd?"
    )
    assert spelled.spans == CHAT.spans
    assert not spelled.tools


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    assert spell_out_tools(CHAT, "{{ tools }}") is CHAT
    plain = Prompt.chat([Message("user", "x")])
    assert spell_out_tools(plain, "…") is plain


def test_a_template_without_a_system_role() -> None:
    prompt = Prompt.chat([Message("user", "x")], tools=[ADD])
    template = "{{ raise_exception('System role not supported') }}"
    (message,) = spell_out_tools(prompt, template).messages
    assert message.role == "user"
    assert message.parts[-1].text == "x"
