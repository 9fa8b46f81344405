"""Prompt helpers that pack whole nodes.

What does not fit into one prompt goes into the next; a node is cut only where it does not fit
into a prompt of its own. `MiniPIC` gets the nodes, any other model gets plain text.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.prompt_utils import get_empty_prompt_messages
from llama_index.core.tools import BaseTool
from llama_index.llms.minipic._messages import span_blocks
from llama_index.llms.minipic._nodes import NodeText
from llama_index.llms.minipic._packing import NodeTexts, PackedNodes
from llama_index.llms.minipic._room import Room
from llama_index.llms.minipic._spans import SpanMethods
from llama_index.llms.minipic._synthesis import find_nodes
from llama_index.llms.minipic._templates import alone_unranked
from pydantic import PrivateAttr

from minipic_backend.chat import document_core

__all__ = ["SpanChatPromptHelper", "SpanPromptHelper"]


class SpanPromptHelper(PromptHelper):
    """LlamaIndex's `PromptHelper`, packing nodes instead of tokens. Made by `llm.prompt_helper`;
    `context_window`, `num_output` and `chunk_size_limit` may be changed.

    Args:
        llm: the model, whose engine it starts.
    """

    _room: Room = PrivateAttr()

    def __init__(self, llm: SpanMethods) -> None:
        metadata = llm.metadata
        super().__init__(metadata.context_window, metadata.num_output, tokenizer=llm.token_ids)
        self._room = Room(llm)

    @classmethod
    def class_name(cls) -> str:
        return "SpanPromptHelper"

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Texts of nodes, in as few prompts as they fit into, in their order."""
        nodes = _nodes_of(text_chunks)
        if not nodes:
            return [""]
        room = self._room.for_nodes(self, _without_nodes(prompt, llm), llm, tools)
        room = self._room.less(room, padding)
        packs = self._room.pack(nodes, self._limited(room))
        return [_text(pack, llm) for pack in packs]

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Each text with as many of its nodes as fit, the best-ranked."""
        room = self._room.for_nodes(self, _without_nodes(prompt, llm), llm, tools)
        each = self._room.less(room // max(len(text_chunks), 1), padding)
        return NodeTexts(
            _text(self._room.best(_nodes_of([chunk]), self._limited(each)), llm)
            for chunk in text_chunks
        )

    def _limited(self, room: int) -> int:
        return room if self.chunk_size_limit is None else min(room, self.chunk_size_limit)


class SpanChatPromptHelper(ChatPromptHelper):
    """LlamaIndex's `ChatPromptHelper`, packing nodes. Made by `llm.chat_prompt_helper`.

    Args:
        llm: the model, whose engine it starts.
    """

    _room: Room = PrivateAttr()

    def __init__(self, llm: SpanMethods) -> None:
        metadata = llm.metadata
        super().__init__(metadata.context_window, metadata.num_output, tokenizer=llm.token_ids)
        self._room = Room(llm)

    @classmethod
    def class_name(cls) -> str:
        return "SpanChatPromptHelper"

    async def arepack(
        self,
        prompt: BasePromptTemplate,
        messages: Sequence[ChatMessage],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[ChatMessage]:
        """Messages whose blocks are whole nodes, as few as they fit into."""
        if not messages or not _is_ours(llm):
            return await super().arepack(prompt, messages, padding, llm, tools)
        texts = [
            block.text
            for message in messages
            for block in message.blocks
            if isinstance(block, TextBlock)
        ]
        nodes = _nodes_of(texts)
        if not nodes:
            return list(messages)
        room = self._room.for_nodes(self, _without_nodes(prompt, llm), llm, tools)
        packs = self._room.pack(nodes, self._room.less(room, padding))
        return [_message(pack) for pack in packs]

    async def atruncate(
        self,
        prompt: BasePromptTemplate,
        messages: Sequence[ChatMessage],
        padding: int = 5,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> Sequence[ChatMessage]:
        """The first of what `arepack` gives."""
        if not messages or not _is_ours(llm):
            return await super().atruncate(prompt, messages, padding, llm, tools)
        return (await self.arepack(prompt, messages, padding, llm, tools))[:1]


def _nodes_of(texts: Sequence[str]) -> list[NodeText]:
    """What texts are nodes: packed ones, those that are being synthesized, or each text one."""
    if any(isinstance(text, PackedNodes) for text in texts):
        return [
            node
            for text in texts
            for node in (text.nodes if isinstance(text, PackedNodes) else [NodeText(text)])
        ]
    plain = [text for text in texts if text.strip()]
    return find_nodes(plain) or [NodeText(document_core(text)) for text in plain]


def _text(nodes: Sequence[NodeText], llm: LLM | None) -> str:
    packed = PackedNodes(alone_unranked(nodes))
    return packed if _is_ours(llm) else packed.plain


def _message(nodes: Sequence[NodeText]) -> ChatMessage:
    blocks = [
        block
        for node in alone_unranked(nodes)
        for block in span_blocks(node.text, rank=node.rank, id=node.id)
    ]
    return ChatMessage(blocks=blocks)


def _is_ours(llm: LLM | None) -> bool:
    return isinstance(llm.llm if isinstance(llm, StructuredLLM) else llm, SpanMethods)


def _without_nodes(prompt: BasePromptTemplate, llm: LLM | None) -> list[ChatMessage]:
    if isinstance(prompt, SelectorPromptTemplate):
        prompt = prompt.select(llm=llm)
    return get_empty_prompt_messages(prompt)
