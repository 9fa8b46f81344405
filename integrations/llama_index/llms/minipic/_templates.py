"""Formatting LlamaIndex's templates so that nodes stay whole and what users said stays as said."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, TextBlock
from llama_index.core.llms import LLM
from llama_index.core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    SelectorPromptTemplate,
)
from llama_index.llms.minipic._messages import SpanPoint
from llama_index.llms.minipic._nodes import NodeText
from llama_index.llms.minipic._packing import NodeTexts, PackedNodes, mark
from llama_index.llms.minipic._synthesis import find_nodes

__all__ = ["guarded", "unguarded", "with_nodes"]

_CONTEXT = ("context_str", "context_msg")
_CONTEXT_MESSAGES = "context_messages"
_DATA = (*_CONTEXT, "query_str", "existing_answer")
_GUARD = f"said{secrets.token_hex(8)}"
_VARIABLE = re.compile(r"\{(?=(?:" + "|".join(_DATA) + r")\})")


def guarded(prompt: BasePromptTemplate, llm: LLM) -> BasePromptTemplate:
    """A template in whose chat history nothing is a variable.

    The chat engines of LlamaIndex put earlier turns into the template itself, where a user's
    `{context_str}` would be replaced by the documents. They can be told by their shape: the
    documents in the first message, `{query_str}` alone in the last. What lies between was said.
    Undone by `unguarded`.
    """
    if isinstance(prompt, SelectorPromptTemplate):
        prompt = prompt.select(llm=llm)
    if type(prompt) is not ChatPromptTemplate or not _is_chat_engines(prompt.message_templates):
        return prompt
    first, *said, last = prompt.message_templates
    if not any(_VARIABLE.search(message.content or "") for message in said):
        return prompt
    messages = [first, *(_map_texts(message, _guard) for message in said), last]
    return prompt.model_copy(update={"message_templates": messages})


def unguarded(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Messages from a guarded template, with everything in them as it was said."""
    return [
        _map_texts(message, unguard) if _GUARD in (message.content or "") else message
        for message in messages
    ]


def unguard(text: str) -> str:
    """`unguarded`, for a prompt that is one text."""
    return text.replace("{" + _GUARD, "{")


def with_nodes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A template's arguments, with nodes in place of the text that a synthesizer made of them."""
    result = dict(arguments)
    for name in _CONTEXT:
        if name in result:
            result[name] = _with_nodes(result[name])
    if _CONTEXT_MESSAGES in result:
        result[_CONTEXT_MESSAGES] = _marked_messages(result[_CONTEXT_MESSAGES])
    return result


def _with_nodes(value: Any) -> Any:
    if isinstance(value, PackedNodes):
        return value
    if isinstance(value, str):
        nodes = find_nodes([value])
        return PackedNodes(alone_unranked(nodes)) if nodes else value
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        # simple_summarize: a list, of which a template would print the repr.
        return NodeTexts(_with_nodes(item) for item in value)
    return value


def alone_unranked(nodes: Sequence[NodeText]) -> list[NodeText]:
    """Nodes of one prompt. A lone one has no rank: with no other document to be read beside,
    there is nothing to win by computing it late."""
    if len(nodes) == 1:
        return [NodeText(nodes[0].text, id=nodes[0].id)]
    return list(nodes)


def _marked_messages(messages: Any) -> Any:
    """Context that is messages (`multimodal=True`): each of their texts is a node."""
    if not isinstance(messages, list):
        return messages
    texts = [
        (place, index)
        for place, message in enumerate(messages)
        for index, block in enumerate(message.blocks)
        if isinstance(block, TextBlock) and block.text.strip()
    ]
    nodes = []
    for place, index in texts:
        blocks = messages[place].blocks
        point = next(iter(blocks[index + 1 : index + 2]), None)
        known = point if isinstance(point, SpanPoint) else SpanPoint()
        nodes.append(NodeText(blocks[index].text, known.rank, known.id))
    marked: list[list[ContentBlock]] = [list(message.blocks) for message in messages]
    for (place, index), node in zip(texts, alone_unranked(nodes), strict=True):
        marked[place][index] = TextBlock(text=mark(node))
    return [
        message.model_copy(update={"blocks": blocks})
        for message, blocks in zip(messages, marked, strict=True)
    ]


def _is_chat_engines(messages: Sequence[ChatMessage]) -> bool:
    return (
        len(messages) > 2
        and messages[-1].content == "{query_str}"
        and any("{" + name + "}" in (messages[0].content or "") for name in _CONTEXT)
    )


def _guard(text: str) -> str:
    return _VARIABLE.sub("{" + _GUARD, text)


def _map_texts(message: ChatMessage, change: Any) -> ChatMessage:
    blocks = [
        TextBlock(text=change(block.text)) if isinstance(block, TextBlock) else block
        for block in message.blocks
    ]
    return message.model_copy(update={"blocks": blocks})
