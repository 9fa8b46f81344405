"""vLLM's own tool parsers, for families whose calls are not JSON. Needs vLLM in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.tools.answer import Answer, AnswerDelta, ToolCall, ToolCallDelta
from minipic_backend.tools.parser import AnswerFormat, AnswerParser, new_call_id

__all__ = ["VllmParser"]


class VllmParser:
    """One answer, read by a parser of vLLM's. Reasoning is split off first, by ours.

    Args:
        name: as for `vllm serve --tool-call-parser`.
        tokenizer: the model's.
        tools: the tools there are.
        format: its reasoning tags are used.

    Raises:
        ConfigurationError: vLLM is not installed, or has no such parser.
    """

    def __init__(
        self, name: str, tokenizer: Any, tools: Sequence[Any], format: AnswerFormat
    ) -> None:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigurationError(
                f"tool_parser={shown(name)} is one of vLLM's, and vLLM is not "
                f"installed here ({error})"
            ) from error
        try:
            parser_class = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            raise ConfigurationError(f"tool_parser={shown(name)}: {error.args[0]}") from error
        self._request = ChatCompletionRequest(
            model="", messages=[], tools=[dict(tool) for tool in tools]
        )
        self._parser = parser_class(tokenizer, self._request.tools)
        self._reasoning = AnswerParser(
            AnswerFormat(reasoning=format.reasoning, reasoning_open=format.reasoning_open)
        )
        self._text = ""
        self._token_ids: list[int] = []

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> AnswerDelta:
        """What the next piece of text amounts to."""
        return self._stream(self._reasoning.feed(text), token_ids)

    def finish(self) -> AnswerDelta:
        """What was held back; call it once, at the end."""
        last = self._stream(self._reasoning.finish(), ())
        rest = self._parser.get_remaining_unstreamed_args()
        if not rest:
            return last
        piece = ToolCallDelta(len(self._parser.prev_tool_call_arr) - 1, arguments=rest)
        return AnswerDelta(last.content, last.reasoning, (*last.tool_calls, piece))

    def parse(self, text: str, token_ids: tuple[int, ...] = ()) -> Answer:
        """A whole answer; for a parser that has read nothing yet."""
        split = self._reasoning.parse(text)
        found = self._parser.extract_tool_calls(split.content, self._request)
        calls = tuple(
            ToolCall(call.id or new_call_id(), call.function.name, call.function.arguments)
            for call in found.tool_calls
        )
        return Answer(found.content or "", split.reasoning, calls)

    def _stream(self, delta: AnswerDelta, token_ids: tuple[int, ...]) -> AnswerDelta:
        if not delta.content:
            return delta
        before, ids_before = self._text, list(self._token_ids)
        self._text += delta.content
        self._token_ids += token_ids
        found = self._parser.extract_tool_calls_streaming(
            before,
            self._text,
            delta.content,
            ids_before,
            list(self._token_ids),
            list(token_ids),
            self._request,
        )
        if found is None:
            return AnswerDelta(reasoning=delta.reasoning)
        pieces = tuple(_piece(call) for call in found.tool_calls or ())
        return AnswerDelta(found.content or "", delta.reasoning, pieces)


def _piece(call: Any) -> ToolCallDelta:
    name = call.function.name if call.function else None
    arguments = call.function.arguments if call.function else None
    id = (call.id or new_call_id()) if name else None
    return ToolCallDelta(call.index, id, name, arguments or "")
