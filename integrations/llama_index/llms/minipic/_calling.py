"""Tools: the model asked for calls, and calls found in its answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool
from llama_index.llms.minipic._messages import call_arguments, unmarked

from minipic_backend import AnswerError
from minipic_backend.errors import shown

__all__ = ["Calling"]

_logger = logging.getLogger(__name__)


class Calling(FunctionCallingLLM):
    """Asks for tool calls, and finds them in answers."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = [unmarked(message) for message in chat_history or ()]
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        options = dict(kwargs)
        if tools:
            choice = tool_choice if tool_choice is not None else tool_required or None
            options |= {
                "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
                "tool_choice": choice,
                "parallel_tool_calls": allow_parallel_tool_calls,
            }
        return {"messages": messages, **options}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """The first call alone, where calls in parallel are not allowed."""
        message = response.message
        calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
        if not allow_parallel_tool_calls and len(calls) > 1:
            rest = calls[1:]
            message.blocks = [block for block in message.blocks if block not in rest]
            message.additional_kwargs["tool_calls"] = message.additional_kwargs["tool_calls"][:1]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of an answer, arguments as dicts; of a call that is still being
        written, what there is.

        Raises:
            AnswerError: there are none, and that is an error.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise AnswerError(
                f"The model called no tool but answered: {shown(response.message.content)}. "
                "tool_required=True makes it"
            )
        if calls and _was_cut_off(response):
            _logger.warning(
                "The answer was cut off at max_tokens inside of a tool call (%s): its arguments "
                "may be incomplete",
                calls[-1].tool_kwargs,
            )
        return [
            ToolSelection(
                tool_id=call.tool_call_id or call.tool_name,
                tool_name=call.tool_name,
                tool_kwargs=call_arguments(call.tool_kwargs),
            )
            for call in calls
        ]


def _was_cut_off(response: ChatResponse) -> bool:
    choices = response.raw.get("choices", []) if isinstance(response.raw, dict) else []
    return any(choice["finish_reason"] == "length" for choice in choices)
