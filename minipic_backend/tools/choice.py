"""Which tools a model may or must call, and what decoding is held to for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from minipic_backend.errors import ConfigurationError, shown

__all__ = ["ToolChoice", "calls_schema", "calls_tag", "resolve_tool_choice", "tool_name"]

_MAX_WHITESPACE = 20
"""Characters of white space in a row, where JSON allows any number: small models never stop."""

Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema}}"""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the model does with its tools.

    Args:
        mode: "none": answer in text; "auto": as it likes; "required": at least one call;
            "named": one call of `name`.
        name: the tool of "named".
    """

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


def tool_name(tool: Tool) -> str:
    """Name of a tool.

    Raises:
        ConfigurationError: not a tool in the form above.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            "A tool is {'type': 'function', 'function': {'name': …, 'parameters': …}}, "
            f"not {shown(tool)}"
        )
    return name


def resolve_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """A choice as users of several libraries write it.

    Args:
        choice: None or "auto"; "none" or False; "any", "required" or True; a tool's name; or
            {"type": "function", "function": {"name": …}}.
        tools: the tools there are. One that is required alone is "named": its name is known.

    Raises:
        ConfigurationError: an unknown choice or tool, or a choice without tools.
    """
    names = [tool_name(tool) for tool in tools]
    if choice in (None, "auto"):
        return ToolChoice("auto" if names else "none")
    if choice is False or choice == "none":
        return ToolChoice("none")
    if not names:
        raise ConfigurationError(f"tool_choice={shown(choice)} without tools")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice is True or (choice in ("any", "required") and choice not in names):
        return ToolChoice("named", names[0]) if len(names) == 1 else ToolChoice("required")
    if choice not in names:
        raise ConfigurationError(
            f"tool_choice={shown(choice)}: choose 'auto', 'none', 'any', or one of "
            f"{', '.join(names)}"
        )
    return ToolChoice("named", str(choice))


def calls_schema(choice: ToolChoice, tools: Sequence[Tool], *, parallel: bool = True) -> Any:
    """JSON schema of an answer under a forced choice: the arguments of the one tool, or a list of
    {"name": …, "arguments": …}.

    Raises:
        ConfigurationError: the choice forces nothing; or two tools define the same `$defs` name
            differently.
    """
    if choice.mode == "named":
        return _parameters(next(tool for tool in tools if tool_name(tool) == choice.name))
    if choice.mode != "required":
        raise ConfigurationError(f"tool_choice {shown(choice.mode)} forces no call")
    definitions: dict[str, Any] = {}
    options = []
    for tool in tools:
        parameters = _parameters(tool)
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ConfigurationError(
                    f"Two tools define a type {shown(name)} differently: rename one of them"
                )
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool_name(tool)}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": options}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema


def calls_tag(
    choice: ToolChoice, tools: Sequence[Tool], *, start: str, end: str, parallel: bool = True
) -> str:
    """As `calls_schema`, as a structural tag: calls between `start` and `end`, as the model was
    taught to write them, which small models need to find the right arguments. With "auto": any
    text, in which what begins as a call is one."""
    tags = [
        {
            "type": "tag",
            "begin": f'{start}\n{{"name": {json.dumps(tool_name(tool))}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": _parameters(tool),
                "max_whitespace_cnt": _MAX_WHITESPACE,
            },
            "end": f"}}\n{end}",
        }
        for tool in tools
        if choice.name in (None, tool_name(tool))
    ]
    if choice.mode == "named":
        return json.dumps({"type": "structural_tag", "format": tags[0]})
    if choice.mode == "auto":
        anywhere = {"type": "triggered_tags", "triggers": [start], "tags": tags}
        return json.dumps({"type": "structural_tag", "format": anywhere})
    several = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return json.dumps({"type": "structural_tag", "format": several})


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = deepcopy(dict(tool["function"].get("parameters") or {}))
    if not parameters.get("properties") and "$ref" not in parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters
