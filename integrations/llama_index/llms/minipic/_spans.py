"""What a user may do about spans by hand: warm and explain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.llms.minipic._engine import EngineBacked
from llama_index.llms.minipic._frames import Framed, frame_of
from llama_index.llms.minipic._messages import to_prompt, unmarked_parts
from llama_index.llms.minipic._nodes import NodeLike, texts_of
from llama_index.llms.minipic._synthesis import watch
from pydantic import Field

from minipic_backend import Explanation, Prompt, WarmReport
from minipic_backend.quality.compare import DEFAULT_TECHNIQUES, Comparison

__all__ = ["SpanMethods"]


class SpanMethods(EngineBacked, LLM):
    """Spans, by hand."""

    is_chat_model: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        watch()

    def warm(
        self,
        nodes: Iterable[NodeLike] | NodeLike,
        prompt: Framed = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> WarmReport:
        """Compute nodes ahead of time.

        Args:
            nodes: as an index gives them, with or without scores; or their texts; or one.
            prompt: where they will be used. With frame "prefix" a span belongs to what precedes
                the first span of its prompt. A query engine, a chat engine, a response
                synthesizer, a template, messages with a span in them, or a list of such. Default:
                the template that query engines use.
            progress: show a progress bar.
            options: layout and request options, as in a call.

        Raises:
            PromptError: an element is no node; or a prompt without a place for nodes.
        """
        texts = [text for text in texts_of(nodes) if text]
        layout = self._layout_options(options)
        engine = self._get_engine()
        reports = [
            engine.warm(texts, prompt=frame, progress=progress, **layout)
            for frame in frame_of(prompt, self)
        ]
        return WarmReport(
            sum(report.num_spans for report in reports),
            sum(report.num_computed_tokens for report in reports),
            sum(report.num_cached_tokens for report in reports),
            sum(report.seconds for report in reports),
        )

    async def awarm(
        self, nodes: Iterable[NodeLike] | NodeLike, prompt: Framed = None, **options: Any
    ) -> WarmReport:
        """`warm`, in a thread of its own."""
        return await asyncio.to_thread(self.warm, nodes, prompt, **options)

    def explain(self, prompt: str | Sequence[ChatMessage] | Prompt, **options: Any) -> Explanation:
        """How a prompt is laid out, segment by segment, and what of it is cached now."""
        where = self._as_prompt(prompt)
        return self._get_engine().explain(where, **self._layout_options(options))

    def compare(
        self,
        prompt: str | Sequence[ChatMessage] | Prompt,
        techniques: Sequence[str] = DEFAULT_TECHNIQUES,
        *,
        max_tokens: int = 64,
    ) -> Comparison:
        """What each technique answers, and how far it is from full attention: print it.

        Args:
            prompt: with documents.
            techniques: such as "primed:late=2" or "block_attention"; see docs/quality.md.
            max_tokens: of each answer.
        """
        where = self._as_prompt(prompt)
        return self._get_engine().compare(where, techniques, max_tokens=max_tokens)

    def _as_prompt(self, prompt: str | Sequence[ChatMessage] | Prompt) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str) and not self.is_chat_model:
            return Prompt(unmarked_parts(prompt))
        messages = [ChatMessage(content=prompt)] if isinstance(prompt, str) else prompt
        return to_prompt(messages, template_kwargs=self.chat_template_kwargs)
