"""Takes answers apart piece by piece: streamed or whole, the outcome is the same."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from minipic_backend.tools.answer import Answer, AnswerDelta, ToolCallDelta
from minipic_backend.tools.json_calls import SEPARATORS, JsonCalls
from minipic_backend.tools.syntax import ReasoningTags, ToolSyntax

__all__ = ["AnswerFormat", "AnswerParser", "TextParser"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer may hold.

    Args:
        tools: how tool calls look; None: there are none to look for.
        names: tools there are. JSON without a tag around it is a call only of one of these.
        only_arguments_of: an answer that starts as a JSON object is the arguments of this tool,
            as forced decoding makes it.
        reasoning: the tags around reasoning; None: all of it is content.
        reasoning_open: the prompt ends with the start tag, so that reasoning comes at once.
    """

    tools: ToolSyntax | None = None
    names: frozenset[str] = frozenset()
    only_arguments_of: str | None = None
    reasoning: ReasoningTags | None = None
    reasoning_open: bool = False

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the engine must leave special tokens in the answer's text."""
        tagged = (self.tools, self.reasoning)
        return any(part is not None and part.special for part in tagged)


class TextParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> AnswerDelta:
        """What the next piece of text amounts to."""

    def finish(self) -> AnswerDelta:
        """What was held back; call it once, at the end."""

    def parse(self, text: str, token_ids: tuple[int, ...] = ()) -> Answer:
        """A whole answer; for a parser that has read nothing yet."""


class _State(Enum):
    START = auto()  # nothing but white space so far
    REASONING = auto()
    ARGUMENTS = auto()  # of the one tool there can be, to the end
    CONTENT = auto()
    CALLS = auto()
    CLOSING = auto()  # behind a call, where its closing tag may come
    BETWEEN = auto()  # behind calls or reasoning: white space waits for what follows it


class AnswerParser:
    """Reads one answer in a format of ours.

    Args:
        format: what to look for.
        new_id: makes ids of tool calls.
    """

    def __init__(self, format: AnswerFormat, new_id: Callable[[], str] | None = None) -> None:
        self._format = format
        self._new_id = new_id or new_call_id
        self._held = ""
        self._opening = ""
        self._num_calls = 0
        self._reasoned = False
        self._calls: JsonCalls | None = None
        opened = format.reasoning is not None and format.reasoning_open
        self._state = _State.REASONING if opened else _State.START

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> AnswerDelta:
        """What the next piece of text amounts to."""
        return self._read(text, final=False)

    def finish(self) -> AnswerDelta:
        """What was held back; call it once, at the end."""
        return self._read("", final=True)

    def parse(self, text: str, token_ids: tuple[int, ...] = ()) -> Answer:
        """A whole answer; for a parser that has read nothing yet."""
        return Answer.join([self.feed(text, token_ids), self.finish()])

    def _read(self, text: str, *, final: bool) -> AnswerDelta:
        readers = {
            _State.START: self._read_start,
            _State.ARGUMENTS: self._read_arguments,
            _State.REASONING: self._read_reasoning,
            _State.CONTENT: self._read_content,
            _State.CALLS: self._read_calls,
            _State.CLOSING: self._read_closing,
            _State.BETWEEN: self._read_between,
        }
        parts: list[AnswerDelta] = []
        text, self._held = self._held + text, ""
        while text:
            text = readers[self._state](text, parts, final)
        if final and self._calls is not None:
            parts.append(AnswerDelta(self._abandon(self._calls)))
        return AnswerDelta(
            "".join(part.content for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(piece for part in parts for piece in part.tool_calls),
        )

    # Each reader takes a text and gives back what is left for the next one.

    def _read_start(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        core = text.lstrip()
        reasoning, tools = self._format.reasoning, self._format.tools
        if not final:
            waits = reasoning is not None and reasoning.start.startswith(core)
            if not core or (waits and reasoning is not None and core != reasoning.start):
                self._held = text
                return ""
        if reasoning is not None and core.startswith(reasoning.start):
            self._state = _State.REASONING
            return core[len(reasoning.start) :]
        if self._format.only_arguments_of is not None and core.startswith("{"):
            self._state = _State.ARGUMENTS
            return core
        if tools is not None and tools.bare and core[:1] in ("{", "["):
            return self._open(text[: len(text) - len(core)], core, known=self._format.names)
        self._state = _State.CONTENT
        return text

    def _read_arguments(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        first, self._num_calls = self._num_calls == 0, 1
        id, name = (self._new_id(), self._format.only_arguments_of) if first else (None, None)
        parts.append(AnswerDelta(tool_calls=(ToolCallDelta(0, id, name, text),)))
        return ""

    def _read_reasoning(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        assert self._format.reasoning is not None
        end = self._format.reasoning.end
        text = text if self._reasoned else text.lstrip()
        self._reasoned = bool(text)
        before, found, rest = text.partition(end)
        if found or final:
            parts.append(AnswerDelta(reasoning=before.rstrip()))
            self._state = _State.BETWEEN if found else self._state
            return rest
        kept = _safe_length(text, (end,))
        parts.append(AnswerDelta(reasoning=text[:kept]))
        self._held = text[kept:]
        return ""

    def _read_between(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        core = text.lstrip()
        tools = self._format.tools
        if not core:
            self._held = text
            return ""
        if tools is not None and tools.bare and not self._num_calls and core[0] in "{[":
            return self._open("", core, known=self._format.names)
        self._state = _State.CONTENT
        return core

    def _read_content(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        starts = self._format.tools.starts if self._format.tools is not None else ()
        found = [(place, start) for start in starts if (place := text.find(start)) >= 0]
        if found:
            place, start = min(found)
            content = text[:place]
            parts.append(AnswerDelta(content.rstrip()))
            lead = content[len(content.rstrip()) :]
            return self._open(lead + start, text[place + len(start) :], known=None)
        kept = len(text) if final else _safe_length(text, starts)
        parts.append(AnswerDelta(text[:kept]))
        self._held = text[kept:]
        return ""

    def _open(self, opening: str, text: str, known: frozenset[str] | None) -> str:
        assert self._format.tools is not None
        self._opening = opening
        self._calls = JsonCalls(
            self._format.tools.name_key,
            self._format.tools.arguments_keys,
            self._new_id,
            first_index=self._num_calls,
            known=known,
        )
        self._state = _State.CALLS
        return text

    def _read_calls(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        calls = self._calls
        assert calls is not None
        deltas, rest = calls.feed(text)
        parts.append(AnswerDelta(tool_calls=tuple(deltas)))
        if rest is None:
            return ""
        self._calls = None
        if calls.next_index == self._num_calls:
            parts.append(AnswerDelta(self._abandon(calls)))
            self._state = _State.CONTENT
            return rest
        self._num_calls = calls.next_index
        self._state = _State.CLOSING
        return rest

    def _abandon(self, calls: JsonCalls) -> str:
        """Content that looked like the beginning of calls."""
        rest = calls.finish()
        if calls.next_index == self._num_calls:
            return self._opening + rest
        return rest if rest.strip(SEPARATORS) else ""

    def _read_closing(self, text: str, parts: list[AnswerDelta], final: bool) -> str:
        end = self._format.tools.end if self._format.tools is not None else None
        if end is not None and end.startswith(text) and text != end:
            self._held = "" if final else text
            return ""
        self._state = _State.BETWEEN
        return text.removeprefix(end or "")


def _safe_length(text: str, tags: tuple[str, ...]) -> int:
    """How much of `text` cannot be the beginning of a tag, nor white space in front of one."""
    longest = max((len(tag) for tag in tags), default=1) - 1
    overlap = 0
    for size in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            overlap = size
            break
    return len(text[: len(text) - overlap].rstrip()) if tags else len(text)


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
