"""LangChain messages to a `minipic_backend.Prompt`.

A text block becomes a span where it says so:

    {"type": "text", "text": …, "extras": {"minipic": {"span": True, "rank": 0, "id": "…"}}}

Anthropic's `cache_control` on a text block is taken as the same wish. The two differ: theirs
marks the end of a prefix that must come again byte for byte; ours marks an independent part that
is reused wherever it stands, and that sees nothing between the frame and itself. So two blocks
that carry `cache_control` stay ordinary text: the first of the system message, which is a prefix
that vLLM caches anyway, and the last of the final human message, which is the question and has
to see everything before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts.string import StringPromptTemplate

from langchain_minipic._marks import is_marked
from langchain_minipic._prompt_messages import MARK, ROLES, find_schema_prompt, span_block
from langchain_minipic.documents import (
    DocumentLike,
    document_name,
    each_document,
    marked_documents,
    read_document,
)
from minipic_backend import Message, Prompt, PromptError, Span, Text
from minipic_backend.chat import document_core as canonical
from minipic_backend.chat import document_parts, join_texts, merge_messages
from minipic_backend.errors import shown
from minipic_backend.prompt import Part

__all__ = [
    "block_parts",
    "canonical",
    "has_spans",
    "join_texts",
    "marked_parts",
    "span_block",
    "span_blocks",
    "to_prompt",
]

_MARK_KEYS = {"span", "rank", "id", "schema"}
_REASONING = {"reasoning", "thinking"}
# Blocks of an answer that `tool_calls` holds as well.
_TOOL_CALLS = {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"}


def span_blocks(
    documents: Iterable[DocumentLike] | Document | Span | str,
    *,
    document_prompt: StringPromptTemplate | None = None,
    document_separator: str = "\n\n",
    ranked: bool = True,
) -> list[dict[str, Any]]:
    """Documents as the content of a message, each a span; what a tool may return.

    Args:
        documents: the best first; or one; texts are taken as they are, and so are `Span`s, with
            ranks of their own.
        document_prompt: a template over `page_content` and metadata; default: the content alone.
        document_separator: whitespace between documents, for models that read plain text.
        ranked: whether the order is one of relevance.

    Raises:
        PromptError: an element is neither a document, nor a Span, nor a str.
    """
    found = each_document(documents)
    blocks = []
    for place, document in enumerate(found):
        text = read_document(document, document_prompt, place if ranked else None)
        gap = document_separator if place < len(found) - 1 else ""
        blocks.append(span_block(text.text + gap, rank=text.rank, id=text.id))
    return blocks


def to_prompt(
    messages: Sequence[BaseMessage],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """A chat prompt. Neighbouring human (and system) messages become one, a blank line between.

    Raises:
        PromptError: no messages, a kind of message or block that we cannot send, a wrong mark.
    """
    converted = []
    for index, message in enumerate(messages):
        parts = _parts(message, is_first=index == 0, is_last=index == len(messages) - 1)
        converted.append(Message(_role(message), parts, _extra(message)))
    merged = merge_messages(converted)
    if (schema_prompt := find_schema_prompt(messages)) is not None:
        return schema_prompt.with_chat_options(tools, template_kwargs)
    return Prompt.chat(merged, tools=tools, template_kwargs=template_kwargs)


def has_spans(message: BaseMessage) -> bool:
    """Whether any block of the message is marked."""
    return not isinstance(message.content, str) and any(
        isinstance(block, dict) and _wish(block) is not None for block in message.content
    )


def block_parts(block: dict[str, Any], *, keep_text: bool = False) -> list[Part]:
    """A text block as parts; joined, their texts are the block's text. `keep_text` ignores a
    `cache_control`."""
    text = block.get("text")
    if not isinstance(text, str):
        raise PromptError(f"A text block holds {shown(text)} instead of a str")
    wish = _wish(block)
    if wish is None or (keep_text and not wish):
        return [Text(text)]
    return document_parts(text, rank=wish.get("rank"), id=wish.get("id"))


def _parts(message: BaseMessage, *, is_first: bool, is_last: bool) -> list[Part]:
    if isinstance(message.content, str):
        return _text_parts(message.content, getattr(message, "artifact", None))
    parts: list[Part] = []
    for index, block in enumerate(message.content):
        if isinstance(block, str):
            parts.append(Text(block))
        elif block.get("type") == "text":
            is_prefix = is_first and index == 0 and isinstance(message, SystemMessage)
            ends = is_last and index == len(message.content) - 1
            is_question = ends and isinstance(message, HumanMessage)
            parts.extend(block_parts(block, keep_text=is_prefix or is_question))
        elif isinstance(message, AIMessage) and block.get("type") in _REASONING | _TOOL_CALLS:
            continue
        else:
            raise PromptError(
                f"A {message.type} message holds a block of type {shown(block.get('type'))}; "
                "MiniPIC serves text"
            )
    return parts


def _text_parts(text: str, artifact: Any) -> list[Part]:
    """A plain text, with the documents that are marked in it, or that a tool gave along with it
    and that stand in it word for word, as spans."""
    if is_marked(text):
        return marked_parts(text)
    parts: list[Part] = []
    documents = artifact if isinstance(artifact, list | tuple) else ()
    for rank, document in enumerate(documents):
        if not isinstance(document, Document) or not document.page_content.strip():
            continue
        before, found, after = text.partition(document.page_content)
        if found:
            name = document_name(document)
            parts += [Text(before), *document_parts(found, rank=rank, id=name)]
            text = after
    return [part for part in (*parts, Text(text)) if part.text]


def marked_parts(text: str) -> list[Part]:
    """A text with marks of `SpanDocumentPrompt` in it; documents are ranked as they stand."""
    parts: list[Part] = []
    rank = 0
    for piece in marked_documents(text):
        if isinstance(piece, str):
            parts.append(Text(piece))
        else:
            parts += document_parts(piece.page_content, rank=rank)
            rank += 1
    return parts


def _wish(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mark of a span; an empty one stands for `cache_control`."""
    extras = block.get("extras") or {}
    mark = extras.get(MARK) if isinstance(extras, Mapping) else None
    if mark is not None:
        if not isinstance(mark, Mapping) or set(mark) - _MARK_KEYS:
            raise PromptError(
                f"extras[{MARK!r}] is a dict with the keys span, rank and id, not {shown(mark)}"
            )
        return mark if mark.get("span", True) else None
    return {} if block.get("cache_control") or extras.get("cache_control") else None


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return ROLES.get(message.role, message.role)
    for kind, role in (
        (SystemMessage, "system"),
        (HumanMessage, "user"),
        (AIMessage, "assistant"),
        (ToolMessage, "tool"),
        (FunctionMessage, "tool"),
    ):
        if isinstance(message, kind):
            return role
    raise PromptError(f"Cannot send a {type(message).__name__} to a model")


def _extra(message: BaseMessage) -> dict[str, Any]:
    """Further keys for the chat template. Arguments of tool calls stay dicts, as templates want."""
    extra: dict[str, Any] = {"name": message.name} if message.name else {}
    if isinstance(message, ToolMessage):
        extra["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        if message.tool_calls:
            extra["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["args"]},
                }
                for call in message.tool_calls
            ]
        if reasoning := _reasoning(message):
            extra["reasoning_content"] = reasoning
    return extra


def _reasoning(message: AIMessage) -> str:
    if isinstance(message.content, str):
        return str(message.additional_kwargs.get("reasoning_content") or "")
    blocks = [block for block in message.content if isinstance(block, dict)]
    texts = [block.get(kind) for kind in sorted(_REASONING) for block in blocks]
    return "\n".join(text for text in texts if isinstance(text, str))
