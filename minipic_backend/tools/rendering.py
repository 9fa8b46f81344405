"""Tools for chat templates that know none: their definitions, calls and results as text.

The text is that of the Hermes format, which most open models have seen, so that even a model
whose template leaves tools out can be asked for calls, and its answers be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from minipic_backend.prompt import Message, Part, Prompt, Text

__all__ = ["spell_out_tools"]

_DEFINITIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def spell_out_tools(prompt: Prompt, template: str) -> Prompt:
    """`prompt` with tools, tool calls and tool results as text, where `template` (its source)
    does not know them; else `prompt` itself."""
    uses_tools = prompt.tools or any(map(_uses_tools, prompt.messages))
    if not uses_tools or "tools" in template:
        return prompt
    messages = [_spelled_out(message) for message in prompt.messages]
    if prompt.tools:
        messages = _with_definitions(messages, prompt.tools, template)
    return Prompt.chat(
        list(_merged(messages)),
        template_kwargs=prompt.template_kwargs,
        add_generation_prompt=prompt.add_generation_prompt,
    )


def _uses_tools(message: Message) -> bool:
    names = {"assistant": "tool_calls", "tool": "tool_call_id"}
    return names.get(message.role) in message.extra


def _spelled_out(message: Message) -> Message:
    if not _uses_tools(message):
        return message
    extra = dict(message.extra)
    if message.role == "tool":
        extra.pop("tool_call_id", None)
        extra.pop("name", None)
        parts = (Text("<tool_response>\n"), *message.parts, Text("\n</tool_response>"))
        return Message("user", parts, extra)
    calls = extra.pop("tool_calls") or ()
    texts = [f"<tool_call>\n{_json(_call(call))}\n</tool_call>" for call in calls]
    if message.parts and texts:
        texts[0] = "\n" + texts[0]
    return Message(message.role, (*message.parts, Text("\n".join(texts))), extra)


def _call(call: Any) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}


def _with_definitions(
    messages: list[Message], tools: Sequence[Any], template: str
) -> list[Message]:
    text = _DEFINITIONS.format(tools="\n".join(_json(tool) for tool in tools))
    first = messages[0]
    if first.role == "system":
        return [_with_parts(first, (*first.parts, Text("\n\n" + text))), *messages[1:]]
    if "system role not supported" in template.lower() and first.role == "user":
        return [_with_parts(first, (Text(text + "\n\n"), *first.parts)), *messages[1:]]
    return [Message("system", text), *messages]


def _with_parts(message: Message, parts: tuple[Part, ...]) -> Message:
    return Message(message.role, parts, message.extra)


def _merged(messages: Iterable[Message]) -> Iterable[Message]:
    """Neighbouring user turns as one: some templates insist that roles alternate."""
    pending: Message | None = None
    for message in messages:
        if pending and pending.role == message.role == "user" and pending.extra == message.extra:
            parts = (*pending.parts, Text("\n"), *message.parts)
            pending = _with_parts(pending, parts)
            continue
        if pending:
            yield pending
        pending = message
    if pending:
        yield pending


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
