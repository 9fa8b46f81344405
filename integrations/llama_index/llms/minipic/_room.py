"""How many tokens of nodes fit into a prompt, and which nodes that are.

Counted with the model's own tokenizer, generously: what a chat template adds is not rendered
here. Where the count is short after all, the model leaves out old turns, or the engine refuses.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.tools import BaseTool
from llama_index.llms.minipic._history import history_of
from llama_index.llms.minipic._nodes import NodeText
from llama_index.llms.minipic._spans import SpanMethods

from minipic_backend import PromptError
from minipic_backend.layout.primer import AUTO_PRIMER

__all__ = ["Room"]

_PER_MESSAGE = 8
_PER_PROMPT = 48  # a chat template's own system message
_LARGEST_BLOCK = 128
_REMEMBERED = 4096


class Limits(Protocol):
    """The part of LlamaIndex's prompt helpers that says how large prompts may be."""

    context_window: int
    num_output: int


class Room:
    """Measures for one model. Thread-safe.

    Args:
        llm: counts tokens.
    """

    def __init__(self, llm: SpanMethods) -> None:
        self._llm = llm
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def for_nodes(
        self,
        limits: Limits,
        messages: Sequence[ChatMessage],
        llm: LLM | None,
        tools: Sequence[BaseTool] | None,
    ) -> int:
        """Tokens that nodes may have in the prompt that `messages` is without them.

        A chat's history may take what the nodes leave, and half of the room at most: older turns
        will be left out.

        Raises:
            PromptError: there is no room.
        """
        inner = llm.llm if isinstance(llm, StructuredLLM) else llm
        texts = [str(tool.metadata.to_openai_tool(skip_length_check=True)) for tool in tools or ()]
        if isinstance(llm, StructuredLLM):
            texts.append(str(llm.output_cls.model_json_schema()))
        if inner is not None and inner.system_prompt:
            texts.append(inner.system_prompt)
        history = history_of(messages)
        kept = [message for message in messages if all(message is not one for one in history)]
        fixed = self._messages(kept) + sum(map(self._count, texts)) + self._overhead()
        room = limits.context_window - limits.num_output - fixed
        if room <= 0:
            raise PromptError(
                f"No room for nodes: of a context of {limits.context_window} tokens, "
                f"{limits.num_output} are for the answer and {fixed} for the rest of the prompt. "
                "Lower max_tokens, shorten the prompt, or raise max_model_len"
            )
        return max(room - self._messages(history), room // 2)

    def less(self, room: int, padding: int) -> int:
        """`room` without the padding that LlamaIndex asks for, half of it at the least."""
        return max(room - padding, room // 2, 1)

    def pack(self, nodes: Sequence[NodeText], room: int) -> list[list[NodeText]]:
        """Nodes in their order, in packs of at most `room` tokens."""
        packs: list[list[NodeText]] = []
        left = 0
        for node in self._cut(nodes, room):
            cost = self._cost(node.text)
            if not packs or cost > left:
                packs.append([])
                left = room
            packs[-1].append(node)
            left -= cost
        return packs

    def best(self, nodes: Sequence[NodeText], room: int) -> list[NodeText]:
        """The best-ranked nodes that fit, in their order; a part of the best one at the least."""
        order = sorted(range(len(nodes)), key=lambda n: (nodes[n].rank is None, nodes[n].rank or 0))
        kept: set[int] = set()
        left = room
        for place in order:
            cost = self._cost(nodes[place].text)
            if cost <= left:
                kept.add(place)
                left -= cost
        if not kept and nodes:
            return self._cut([nodes[order[0]]], room)[:1]
        return [node for place, node in enumerate(nodes) if place in kept]

    def _cut(self, nodes: Sequence[NodeText], room: int) -> list[NodeText]:
        """Nodes that fit, each. The pieces of one that does not are an eighth of the context, so
        that they do not depend on the prompt; less only where there is no room for that."""
        if all(self._cost(node.text) <= room for node in nodes):
            return list(nodes)
        size = max(self._llm.metadata.context_window // 8, 1)
        while self._rounded(size + 1) > room and size > 1:
            size //= 2
        splitter = TokenTextSplitter(
            chunk_size=size, chunk_overlap=0, tokenizer=self._llm.token_ids
        )
        pieces: list[NodeText] = []
        for node in nodes:
            if self._cost(node.text) <= room:
                pieces.append(node)
                continue
            for part in splitter.split_text(node.text):
                pieces.append(NodeText(part, node.rank, node.id))
        return pieces

    def _cost(self, text: str) -> int:
        """Tokens of a span: marker, text, and pads up to the end of a block."""
        return self._rounded(1 + self._count(text + "\n\n"))

    def _rounded(self, num_tokens: int) -> int:
        return num_tokens + -num_tokens % self._block_size

    @property
    def _block_size(self) -> int:
        if self._llm.technique == "full":
            return 1
        return int(getattr(self._llm._get_engine(), "block_size", _LARGEST_BLOCK))

    def _overhead(self) -> int:
        """The primer, and what fills the prefix up."""
        if self._llm.technique == "full":
            return _PER_PROMPT
        given = self._llm.primer
        passages: Any = AUTO_PRIMER if given in (None, True, "auto") else given or ()
        passages = (passages,) if isinstance(passages, str) else passages
        primer = sum(self._count(passage + "\n\n") for passage in passages)
        return _PER_PROMPT + primer + 2 * self._block_size

    def _messages(self, messages: Sequence[ChatMessage]) -> int:
        return sum(self._count(message.content or "") + _PER_MESSAGE for message in messages)

    def _count(self, text: str) -> int:
        with self._lock:
            if text in self._counts:
                self._counts.move_to_end(text)
                return self._counts[text]
        count = self._llm.count_tokens(text)
        with self._lock:
            self._counts[text] = count
            if len(self._counts) > _REMEMBERED:
                self._counts.popitem(last=False)
        return count
