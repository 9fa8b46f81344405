"""LlamaIndex messages to a `minipic_backend.Prompt`.

A text block that a `CachePoint` follows is a span, and so is what a `CitableBlock` cites. The two
wishes differ: elsewhere a cache point ends a prefix, which must come again byte for byte; here it
marks an independent part that is reused wherever it stands, and that sees nothing between the
frame and itself. So two blocks stay ordinary text behind a plain cache point: the first of the
system message, a prefix that vLLM caches anyway, and the last of the final user message, which is
the question. A `SpanPoint` makes spans of them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.utils import parse_partial_json
from llama_index.llms.minipic._nodes import NodeText
from llama_index.llms.minipic._packing import split_marks
from pydantic import Field

from minipic_backend import Message, Prompt, PromptError, Text
from minipic_backend.chat import document_parts, merge_messages
from minipic_backend.errors import shown
from minipic_backend.prompt import Part

__all__ = ["SpanPoint", "call_arguments", "span_blocks", "to_prompt", "unmarked", "unmarked_parts"]

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
    MessageRole.TOOL: "tool",
}


class SpanPoint(CachePoint):
    """A cache point that says more about the span in front of it. To every other model it is a
    `CachePoint`, and that is what is left of it after a dump.

    Args:
        rank: its place in an order of relevance, 0 the best; None where there is no order.
        id: a name for `explain`.
    """

    cache_control: CacheControl = Field(default_factory=lambda: CacheControl(type="ephemeral"))
    rank: int | None = None
    id: str | None = None


def span_blocks(text: str, *, rank: int | None = None, id: str | None = None) -> list[ContentBlock]:
    """A text block marked as a span, as two blocks for a `ChatMessage` or a `ToolOutput`."""
    return [TextBlock(text=text), SpanPoint(rank=rank, id=id)]


def to_prompt(
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """A chat prompt. Neighbouring user (and system) messages become one, a blank line between.

    Raises:
        PromptError: no messages, or a block that is not text.
    """
    converted = []
    for index, message in enumerate(messages):
        parts = _parts(message, is_first=index == 0, is_last=index == len(messages) - 1)
        converted.append(Message(_ROLES[message.role], parts, _extra(message)))
    return Prompt.chat(merge_messages(converted), tools=tools, template_kwargs=template_kwargs)


def unmarked(message: ChatMessage) -> ChatMessage:
    """A message whose marked nodes stand in blocks of their own."""
    blocks: list[ContentBlock] = []
    for block in message.blocks:
        pieces = split_marks(block.text) if isinstance(block, TextBlock) else []
        if not isinstance(block, TextBlock) or pieces == [block.text]:
            blocks.append(block)
            continue
        for piece in pieces:
            if isinstance(piece, NodeText):
                blocks += span_blocks(piece.text, rank=piece.rank, id=piece.id)
            else:
                blocks.append(TextBlock(text=piece))
    return message.model_copy(update={"blocks": blocks})


def unmarked_parts(text: str) -> list[Part]:
    """A text as parts of a raw prompt."""
    parts: list[Part] = []
    for piece in split_marks(text):
        if isinstance(piece, NodeText):
            parts += document_parts(piece.text, rank=piece.rank, id=piece.id)
        else:
            parts.append(Text(piece))
    return parts


def _parts(message: ChatMessage, *, is_first: bool, is_last: bool) -> list[Part]:
    blocks = unmarked(message).blocks
    parts: list[Part] = []
    follows_text = False
    for index, block in enumerate(blocks):
        point = next(iter(blocks[index + 1 : index + 2]), None)
        if isinstance(block, TextBlock):
            if isinstance(point, SpanPoint):
                parts += document_parts(block.text, rank=point.rank, id=point.id)
            elif isinstance(point, CachePoint) and not (
                (is_first and index == 0 and message.role == MessageRole.SYSTEM)
                or (is_last and index == len(blocks) - 2 and message.role == MessageRole.USER)
            ):
                parts += document_parts(block.text)
            else:
                # `ChatMessage.content` joins its blocks by line breaks too.
                parts += [Text("\n"), Text(block.text)] if follows_text else [Text(block.text)]
                follows_text = True
                continue
            follows_text = False
        elif isinstance(block, CitableBlock):
            parts += document_parts(f"{block.title}\n{_text(block)}", id=block.source or None)
            follows_text = False
        elif not isinstance(block, CachePoint | ThinkingBlock | ToolCallBlock | CitationBlock):
            raise PromptError(
                f"A {message.role.value} message holds a block of type {shown(block.block_type)}; "
                "MiniPIC serves text"
            )
    return parts


def _text(block: CitableBlock) -> str:
    texts = []
    for inner in block.content:
        if not isinstance(inner, TextBlock):
            raise PromptError(f"{shown(block.title)} is not text; MiniPIC serves text")
        texts.append(inner.text)
    return "\n".join(texts)


def _extra(message: ChatMessage) -> dict[str, Any]:
    """Further keys for the chat template. Arguments of tool calls are dicts, as templates want."""
    role, given = _ROLES[message.role], message.additional_kwargs
    names = {"tool": ("name", "tool_call_id")}.get(role, ("name",))
    extra = {name: given[name] for name in names if given.get(name)}
    if role == "assistant":
        if calls := list(_tool_calls(message)):
            extra["tool_calls"] = calls
        thoughts = [block.content for block in message.blocks if isinstance(block, ThinkingBlock)]
        if reasoning := "\n".join(thought for thought in thoughts if thought):
            extra["reasoning_content"] = reasoning
    return extra


def _tool_calls(message: ChatMessage) -> Iterator[dict[str, Any]]:
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    for block in blocks:
        yield _tool_call(block.tool_call_id, block.tool_name, block.tool_kwargs)
    if blocks:
        return
    for call in message.additional_kwargs.get("tool_calls") or ():  # as OpenAI's class has them
        call = call if isinstance(call, Mapping) else call.model_dump()
        function = call.get("function") or call
        yield _tool_call(call.get("id"), function["name"], function["arguments"])


def _tool_call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": id or name,
        "type": "function",
        "function": {"name": name, "arguments": call_arguments(arguments)},
    }


def call_arguments(written: Any) -> dict[str, Any]:
    """A tool call's arguments; of JSON that was cut off, or is still being written, what there
    is. LlamaIndex calls tools with just that."""
    if isinstance(written, Mapping):
        return dict(written)
    try:
        arguments = parse_partial_json(written)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
