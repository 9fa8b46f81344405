"""Anthropic's `/v1/messages` with `cache_control` and documents.

vLLM's route drops the one and refuses the other. Here they become marks of spans, which the
renderer lays out. A body without either goes to vLLM's own handler, as it was.

The two kinds of caching differ: Anthropic's mark ends a prefix that must come again byte for byte;
a span is an independent part that is reused wherever it stands. So some blocks that carry
`cache_control` stay ordinary text: the first of the system prompt, which is a prefix that vLLM
caches anyway; the last of each message, which is a question (clients mark the end of a conversation
so) and has to see everything before it; and answers. A document is a span wherever it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, model_validator
from vllm.entrypoints.anthropic import api_router as stock
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicMessage,
    AnthropicMessagesRequest,
    AnthropicToolChange,  # noqa: F401  # a forward reference of the blocks, resolved here
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from minipic_backend.errors import PromptError, shown
from minipic_backend.json_messages import MARK

__all__ = ["SpanCountTokensRequest", "SpanMessagesRequest", "keep_marks", "router"]

router = APIRouter()

_BILLING = "x-anthropic-billing-header"
_TEXT_TYPES = ("text", "document")


class SpanBlock(AnthropicContentBlock):
    """A content block that keeps what makes it a span."""

    type: Literal[  # vLLM's, and documents
        "text",
        "image",
        "document",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    cache_control: dict[str, Any] | None = None
    minipic: Any = None
    # Of a document.
    title: str | None = None
    context: str | None = None


class SpanMessage(AnthropicMessage):
    """A message of such blocks."""

    content: str | list[SpanBlock]


class _Marked(BaseModel):
    messages: list[SpanMessage]
    system: str | list[SpanBlock] | None = None
    minipic: dict[str, Any] | None = Field(
        default=None, description="Options of MiniPIC's layout: technique, frame, primer, late, …"
    )

    @model_validator(mode="after")
    def place_marks(self) -> Any:
        """Each block that is to be a span gets the mark that says so."""
        _place_marks(self.system, self.messages)
        return self


class SpanMessagesRequest(_Marked, AnthropicMessagesRequest):
    """Anthropic's request with marks."""


class SpanCountTokensRequest(_Marked, AnthropicCountTokensRequest):
    """Anthropic's request to count tokens, with marks."""


class SpanServingMessages(AnthropicServingMessages):
    """vLLM's handler, turning marked blocks into marked parts."""

    @classmethod
    def _build_base_request(cls, anthropic_request: Any, openai_messages: Any) -> Any:
        request = super()._build_base_request(anthropic_request, openai_messages)
        if (chosen := getattr(anthropic_request, MARK, None)) is not None:
            setattr(request, MARK, chosen)
        return request

    @classmethod
    def _convert_system_message(
        cls, anthropic_request: Any, openai_messages: Any, **options: Any
    ) -> None:
        start = len(openai_messages)
        super()._convert_system_message(anthropic_request, openai_messages, **options)
        if not isinstance(anthropic_request.system, list):
            return
        system = _without_billing(anthropic_request.system)
        if any(_mark(block) is not None for block in system):
            parts = [_text_part(block) for block in system if _holds_text(block)]
            inline = openai_messages[start:]
            merged = "".join(one["content"] for one in inline)
            own = "".join(block.text or "" for block in system if block.type == "text")
            if rest := merged.removeprefix(own):
                parts.append({"type": "text", "text": rest})
            openai_messages[start:] = [{"role": "system", "content": parts}]

    @classmethod
    def _convert_message_content(cls, msg: Any, openai_msg: Any, openai_messages: Any) -> None:
        super()._convert_message_content(msg, openai_msg, openai_messages)
        own = [block for block in msg.content if block.type in _TEXT_TYPES]
        marked = [block for block in own if _mark(block) is not None]
        if len(marked) == 1 and isinstance(openai_msg.get("content"), str):
            openai_msg["content"] = [_text_part(marked[0])]  # a single text loses its mark

    @classmethod
    def _convert_block(
        cls,
        block: Any,
        role: str,
        content_parts: Any,
        tool_calls: Any,
        reasoning_parts: Any,
        openai_messages: Any,
    ) -> None:
        if _mark(block) is not None and block.type != "tool_result" and _holds_text(block):
            content_parts.append(_text_part(block))
            return
        super()._convert_block(
            block, role, content_parts, tool_calls, reasoning_parts, openai_messages
        )

    @classmethod
    def _convert_user_tool_result(cls, block: Any, openai_messages: Any) -> None:
        start = len(openai_messages)
        for one in _dicts(block.content):
            if one.get("type") == "text":
                _item_text(one)  # that it is one; vLLM's error would not say so
        super()._convert_user_tool_result(block, openai_messages)
        tool = openai_messages[start]
        if all(_mark(one) is None for one in (block, *_dicts(block.content))):
            return
        if _mark(block) is not None:
            tool["content"] = [
                {"type": "text", "text": _joined_text(block.content), MARK: _mark(block)}
            ]
        else:
            tool["content"] = [
                {"type": "text", "text": _item_text(one), **_carried(one)}
                for one in _dicts(block.content)
                if one.get("type") in _TEXT_TYPES
            ]


@router.post("/v1/messages", dependencies=[Depends(validate_json_request)])
async def create_messages(request: SpanMessagesRequest, raw_request: Request) -> Any:
    """Anthropic's Messages API, documents and blocks with `cache_control` reused as spans."""
    return await stock.create_messages(request, raw_request)


@router.post("/v1/messages/count_tokens", dependencies=[Depends(validate_json_request)])
async def count_tokens(request: SpanCountTokensRequest, raw_request: Request) -> Any:
    """Counts the tokens of such a request, markers and pads included."""
    return await stock.count_tokens(request, raw_request)


def keep_marks(state: Any) -> None:
    """Makes a running server's handler of `/v1/messages` one that keeps marks."""
    if state.anthropic_serving_messages is not None:
        state.anthropic_serving_messages.__class__ = SpanServingMessages


def _place_marks(system: Any, messages: list[SpanMessage]) -> None:
    if isinstance(system, list):
        _place(system, kept=_without_billing(system)[:1])
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            if message.role == "system":
                _check_inline_system(message.content, f"messages[{index}]")
                continue  # one text, joined by vLLM
            is_answer = message.role == "assistant"
            _place(message.content, kept=message.content[0 if is_answer else -1 :])


def _check_inline_system(blocks: list[SpanBlock], where: str) -> None:
    """vLLM takes nothing but the texts of a system message between others."""
    if any(block.type == "document" or block.minipic is not None for block in blocks):
        raise PromptError(
            f"{where}: a system message between others holds no documents; put them into `system` "
            "or into a message of the user"
        )


def _without_billing(system: list[SpanBlock]) -> list[SpanBlock]:
    """Without what an agent adds to each request for its own purposes; vLLM leaves it out too."""
    return [block for block in system if not (block.text or "").startswith(_BILLING)]


def _place(blocks: list[SpanBlock], kept: list[SpanBlock]) -> None:
    """Marks documents, and texts with `cache_control` but for those that are kept as text."""
    for block in blocks:
        if block.type == "tool_result":
            for item in _dicts(block.content):
                kind, own = item.get("type"), item.get(MARK)
                if own is None and (
                    kind == "document" or (kind == "text" and item.get("cache_control"))
                ):
                    item[MARK] = {"span": True}
        elif block.minipic is None and (
            block.type == "document"
            # Itself, not one that is equal: a text may come twice.
            or (block.type == "text" and block.cache_control and not any(block is b for b in kept))
        ):
            block.minipic = {"span": True}


def _mark(block: Any) -> Any:
    return block.get(MARK) if isinstance(block, Mapping) else getattr(block, MARK, None)


def _carried(item: Mapping[str, Any]) -> dict[str, Any]:
    return {MARK: item[MARK]} if item.get(MARK) is not None else {}


def _text_part(block: Any) -> dict[str, Any]:
    part = {"type": "text", "text": _item_text(block.model_dump(exclude_none=True))}
    return part if _mark(block) is None else {**part, MARK: _mark(block)}


def _holds_text(block: SpanBlock) -> bool:
    """Whether a block is text or a document.

    Raises:
        PromptError: it is something else, and has a mark.
    """
    if block.type not in _TEXT_TYPES and _mark(block) is not None:
        raise PromptError(f"A block of type {shown(block.type)} is no text: it cannot be a span")
    return block.type in _TEXT_TYPES


def _item_text(item: Mapping[str, Any]) -> str:
    """The text of a text block, or of a document with its title and context.

    Raises:
        PromptError: what should be text is none.
    """
    if item.get("type") != "document":
        return _text(item.get("text", ""), "A block's text")
    source: Any = item.get("source")
    source = source if isinstance(source, Mapping) else {}
    kind = source.get("type")
    if kind == "text":
        text = _text(source.get("data"), "A document's data")
    elif kind == "content":
        text = _document_content(source.get("content"))
    else:
        raise PromptError(
            f"A document of source type {shown(kind)}: MiniPIC serves text; send its text, as "
            '{"type": "text", "media_type": "text/plain", "data": …}'
        )
    further = [
        _text(item[name], f"A document's {name}") for name in ("title", "context") if item.get(name)
    ]
    return "\n".join(part for part in (*further, text) if part)


def _document_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(
        not isinstance(one, Mapping) or one.get("type") != "text" for one in content
    ):
        raise PromptError("A document's content is a string or a list of text blocks")
    return "\n".join(_item_text(one) for one in content)


def _joined_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_item_text(one) for one in _dicts(content) if one.get("type") in _TEXT_TYPES)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{what} is a string, not {shown(value)}")
    return value


def _dicts(content: Any) -> list[Any]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []
