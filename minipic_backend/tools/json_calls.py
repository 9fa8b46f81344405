"""Reads tool calls written as JSON while they are being written."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from minipic_backend.tools.answer import ToolCallDelta

__all__ = ["SEPARATORS", "JsonCalls"]

SEPARATORS = " \t\r\n[],;"
"""Between calls."""


@dataclass(slots=True)
class _Call:
    """An object under way. `value` is the text of the value being read at depth 1."""

    raw: list[str] = field(default_factory=list)
    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    is_value: bool = False
    key: str = ""
    text: list[str] = field(default_factory=list)
    name: str | None = None
    index: int | None = None
    arguments: list[str] = field(default_factory=list)
    has_arguments: bool = False


class JsonCalls:
    """A run of JSON objects, in a list or not, each `{name_key: …, arguments_key: …}`.

    Args:
        first_index: index of the first call.
        new_id: makes ids.
        known: names that count; None: all. An object with any other name is no call.
    """

    def __init__(
        self,
        name_key: str,
        arguments_keys: Container[str],
        new_id: Callable[[], str],
        *,
        first_index: int = 0,
        known: Container[str] | None = None,
    ) -> None:
        self._name_key = name_key
        self._arguments_keys = arguments_keys
        self._new_id = new_id
        self._known = known
        self.next_index = first_index
        self._call: _Call | None = None
        self._skipped: list[str] = []

    def feed(self, text: str) -> tuple[list[ToolCallDelta], str | None]:
        """Pieces of calls in `text`, and what follows the last object: None while that is nothing
        but separators; whatever comes back is not JSON of ours."""
        deltas: list[ToolCallDelta] = []
        for place, char in enumerate(text):
            if self._call is None:
                if char == "{":
                    self._call = _Call()
                elif char in SEPARATORS:
                    self._skipped.append(char)
                    continue
                else:
                    return deltas, text[place:]
            rejected = self._read(self._call, char, deltas)
            if rejected is not None:
                return deltas, rejected + text[place + 1 :]
        return deltas, None

    def finish(self) -> str:
        """Text since the last call that turned out to be none; no call is under way then."""
        call, self._call = self._call, None
        skipped, self._skipped = "".join(self._skipped), []
        if call is None:
            return skipped
        return "" if call.index is not None else skipped + "".join(call.raw)

    def _read(self, call: _Call, char: str, deltas: list[ToolCallDelta]) -> str | None:
        """One character of an object; the object's text where it turns out to be no call."""
        call.raw.append(char)
        if call.in_string:
            self._add(call, char, deltas)
            if call.escaped:
                call.escaped = False
            elif char == "\\":
                call.escaped = True
            elif char == '"':
                call.in_string = False
            return None
        if char in "}]" and call.depth == 1:
            self._end_value(call, deltas)
            return self._end_call(call, deltas)
        if char == '"':
            call.in_string = True
        elif char in "{[":
            call.depth += 1
            if call.depth == 1:
                return None
        elif char in "}]":
            call.depth -= 1
        elif call.depth == 1 and char == ":" and not call.is_value:
            call.key = _string("".join(call.text)) or ""
            call.is_value, call.text = True, []
            return None
        elif call.depth == 1 and char == ",":
            self._end_value(call, deltas)
            return None
        self._add(call, char, deltas)
        return None

    def _add(self, call: _Call, char: str, deltas: list[ToolCallDelta]) -> None:
        """A character of a key or a value; arguments go out as they come."""
        if not (call.text or char.strip()):
            return
        call.text.append(char)
        if call.is_value and call.key in self._arguments_keys and call.text[0] != '"':
            self._add_arguments(call, char, deltas)

    def _end_value(self, call: _Call, deltas: list[ToolCallDelta]) -> None:
        text = "".join(call.text).strip()
        if call.is_value and call.key == self._name_key and call.name is None:
            call.name = _string(text)
            if call.name and (self._known is None or call.name in self._known):
                call.index = self.next_index
                self.next_index += 1
                early, call.arguments = "".join(call.arguments), []
                deltas.append(ToolCallDelta(call.index, self._new_id(), call.name, early))
        elif call.is_value and call.key in self._arguments_keys:
            if text.startswith('"'):  # some models write the arguments as a string of JSON
                self._add_arguments(call, _string(text) or "{}", deltas)
            call.has_arguments = True
        call.is_value, call.key, call.text = False, "", []

    def _add_arguments(self, call: _Call, text: str, deltas: list[ToolCallDelta]) -> None:
        if call.index is None:
            call.arguments.append(text)
        elif deltas and deltas[-1].index == call.index:
            last = deltas.pop()
            deltas.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + text))
        else:
            deltas.append(ToolCallDelta(call.index, arguments=text))

    def _end_call(self, call: _Call, deltas: list[ToolCallDelta]) -> str | None:
        self._call = None
        if call.index is None:
            skipped, self._skipped = self._skipped, []
            return "".join([*skipped, *call.raw])
        if not call.has_arguments:
            self._add_arguments(call, "{}", deltas)
        self._skipped = []
        return None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
