"""An answer taken apart: what is for the reader, what was reasoning, what calls a tool."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.errors import AnswerError, shown

__all__ = ["Answer", "AnswerDelta", "ToolCall", "ToolCallDelta"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first one of a call has its id and name; `arguments` is the
    next piece of the arguments' JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A piece of an answer, by kind."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A finished tool call; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str

    def parse_arguments(self) -> dict[str, Any]:
        """The arguments as a dict.

        Raises:
            AnswerError: the text is no JSON object, as when `max_tokens` cut it off.
        """
        try:
            arguments = json.loads(self.arguments)
        except ValueError as error:
            raise AnswerError(
                f"The arguments of {self.name} are no JSON ({error}): {shown(self.arguments)}"
            ) from error
        if not isinstance(arguments, dict):
            raise AnswerError(
                f"The arguments of {self.name} are no object: {shown(self.arguments)}"
            )
        return arguments


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def join(cls, deltas: list[AnswerDelta]) -> Answer:
        """The answer that a stream of pieces amounts to."""
        calls: dict[int, _Call] = {}
        for delta in deltas:
            for piece in delta.tool_calls:
                call = calls.setdefault(piece.index, _Call())
                call.id, call.name = piece.id or call.id, piece.name or call.name
                call.arguments.append(piece.arguments)
        return cls(
            "".join(delta.content for delta in deltas),
            "".join(delta.reasoning for delta in deltas),
            tuple(
                ToolCall(call.id, call.name, "".join(call.arguments))
                for _, call in sorted(calls.items())
            ),
        )


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
