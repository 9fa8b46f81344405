"""Agents (`langchain.agents.create_agent`): large stable parts of the state become spans.

Needs the package langchain; the rest of this package does without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.types import Command

from langchain_minipic._document_tools import keeping_documents
from langchain_minipic.messages import has_spans, span_block
from minipic_backend import ConfigurationError
from minipic_backend.config import Frame

__all__ = ["SpanMiddleware"]


class SpanMiddleware(AgentMiddleware[Any, Any, Any]):
    """Marks what is large and will come again: results of tools, and long human messages.

        agent = create_agent(llm, tools, middleware=[SpanMiddleware(frame="none")])

    What the model is shown changes in nothing but the marks; the agent's state stays as it is.
    `Document`s that a tool returns become marked blocks, ranked as they come, instead of their
    Python notation.
    A part is marked or not by its text alone, so that it is the same span on every turn. The last
    human message is left alone: it is the question.

    Args:
        min_chars: the shortest text that becomes a span.
        tools: names of the tools whose results are marked; None: all.
        humans: whether long human messages before the last are marked.
        frame: of every call; None leaves it to the model. With "prefix", a tool's result is
            shared by the turns of one conversation, since the question stands in front of it;
            with "none" or "universal", by all conversations.
    """

    def __init__(
        self,
        *,
        min_chars: int = 400,
        tools: Sequence[str] | None = None,
        humans: bool = True,
        frame: Frame | None = None,
    ) -> None:
        super().__init__()
        if min_chars < 1:
            raise ConfigurationError(f"min_chars={min_chars}: at least 1")
        self._min_chars = min_chars
        self._tool_names = None if tools is None else frozenset(tools)
        self._humans = humans
        self._frame = frame

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """The request with marks in it."""
        return handler(self._marked(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """The request with marks in it."""
        return await handler(self._marked(request))

    def wrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]],
    ) -> ToolMessage | Command[Any]:
        """The call, with documents that the tool returns kept whole."""
        return handler(self._keeping(request))

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """The call, with documents that the tool returns kept whole."""
        return await handler(self._keeping(request))

    def _keeping(self, request: ToolCallRequest) -> ToolCallRequest:
        if request.tool is None:
            return request
        return request.override(tool=keeping_documents(request.tool))

    def _marked(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        changes: dict[str, Any] = {"messages": self.mark(request.messages)}
        if self._frame is not None:
            changes["model_settings"] = {**request.model_settings, "frame": self._frame}
        return request.override(**changes)

    def mark(self, messages: Sequence[AnyMessage]) -> list[AnyMessage]:
        """Messages with marks in them; the given ones are left as they are."""
        humans = [place for place, one in enumerate(messages) if isinstance(one, HumanMessage)]
        last = humans[-1] if humans else -1
        return [
            self._mark(message) if self._wants(message, is_question=place == last) else message
            for place, message in enumerate(messages)
        ]

    def _wants(self, message: BaseMessage, *, is_question: bool) -> bool:
        if isinstance(message, ToolMessage):
            if self._tool_names is not None and message.name not in self._tool_names:
                return False
            return not (message.artifact or has_spans(message))
        return (
            self._humans
            and isinstance(message, HumanMessage)
            and not is_question
            and not has_spans(message)
        )

    def _mark(self, message: AnyMessage) -> AnyMessage:
        content = message.content
        blocks = [content] if isinstance(content, str) else content
        marked = [self._mark_block(block) for block in blocks]
        if all(new is old for new, old in zip(marked, blocks, strict=True)):
            return message
        return message.model_copy(update={"content": marked})

    def _mark_block(self, block: str | dict[str, Any]) -> str | dict[str, Any]:
        text = block if isinstance(block, str) else block.get("text")
        if not isinstance(text, str) or len(text) < self._min_chars:
            return block
        if isinstance(block, str):
            return span_block(text)
        return {**block, "extras": {**(block.get("extras") or {}), **span_block(text)["extras"]}}
