"""What `ChatMiniPIC` and `MiniPIC` share: the engine behind them, warm, explain, close."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import ChatPromptTemplate
from pydantic import PrivateAttr

from langchain_minipic._options import ModelOptions
from langchain_minipic._prompt_messages import with_stand_ins
from langchain_minipic.documents import DocumentLike, document_texts
from langchain_minipic.messages import canonical
from langchain_minipic.prompts import SpanPromptTemplate
from minipic_backend import (
    EngineProtocol,
    Explanation,
    Prompt,
    Span,
    WarmReport,
)
from minipic_backend.engines.deadline import deadline
from minipic_backend.engines.hold import EngineHold
from minipic_backend.quality.compare import DEFAULT_TECHNIQUES, Comparison

__all__ = ["EngineBacked"]


class EngineBacked(ModelOptions):
    """A model with an engine behind it: injected, or leased from those shared by configuration."""

    _hold: EngineHold = PrivateAttr(default_factory=EngineHold)

    def _get_engine(self) -> EngineProtocol:
        return self._hold.engine(self)

    async def _aget_engine(self) -> EngineProtocol:
        """The engine, without holding up the event loop while it starts, or is asked for its
        tokenizer for the first time."""
        return await self._hold.aengine(self, lambda engine: getattr(engine, "tokenizer", None))

    def _context_window(self) -> int | None:
        """Tokens of the context, as far as it is known before an engine runs."""
        if self.engine is not None:
            return self.engine.max_model_len
        if isinstance(given := self.engine_options.get("max_model_len"), int):
            return given
        config = Path(self.model) / "config.json"
        if not config.is_file():
            return None
        found = json.loads(config.read_text()).get("max_position_embeddings")
        return found if isinstance(found, int) else None

    @contextmanager
    def _deadline(
        self, engine: EngineProtocol, options: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Options under which the request is aborted after `timeout` seconds."""
        with deadline(engine, options, self.timeout) as given:
            yield given

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` by the model's own tokenizer, without special tokens added."""
        custom = getattr(self, "custom_get_token_ids", None)
        ids: list[int] = custom(text) if custom else self._get_engine().token_ids(text)
        return ids

    def get_num_tokens(self, text: str) -> int:
        """Tokens of `text` by the model's own tokenizer."""
        if getattr(self, "custom_get_token_ids", None):
            return len(self.get_token_ids(text))
        return self._get_engine().count_tokens(text)

    def warm(
        self,
        docs: Iterable[DocumentLike] | Document | Span | str,
        prompt: ChatPromptTemplate | Prompt | PromptValue | str | Sequence[Any] | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> WarmReport:
        """Compute documents ahead of time.

        Args:
            docs: documents or Spans, or one, as they will be given to the prompt; or their texts.
            prompt: where they will be used: with frame "prefix" a span belongs to what precedes
                the first span of its prompt. A `SpanPromptTemplate` will do, and also decides how
                documents are formatted; its variables before the documents must be filled in.
                In a `Prompt`, a span stands where documents will; it may be blank.
            progress: show a progress bar.
            options: layout and request options, as in a call.

        Returns:
            With a template, `details["variable"]` is the one that was taken for the documents: the
            first that is open.

        Raises:
            PromptError: an element is neither a document, nor a Span, nor a str.
        """
        if isinstance(prompt, ChatPromptTemplate) and not isinstance(prompt, SpanPromptTemplate):
            prompt = SpanPromptTemplate(prompt.messages, partial_variables=prompt.partial_variables)
        variables: list[str] = []
        if isinstance(prompt, SpanPromptTemplate):
            variables = prompt.input_variables
            texts = prompt.document_texts(docs)
            prompt = prompt.frame()
        else:
            texts = document_texts(docs)
        if isinstance(prompt, Prompt):
            prompt = with_stand_ins(prompt)
        spans = [text for text in map(canonical, texts) if text]
        where = None if prompt is None else self._to_prompt(prompt)
        layout = self._layout_options(options)
        report = self._get_engine().warm(spans, prompt=where, progress=progress, **layout)
        taken = [span.id for span in where.spans if span.id in variables] if where else []
        return (
            replace(report, details={**report.details, "variable": taken[0]}) if taken else report
        )

    async def awarm(
        self,
        docs: Iterable[DocumentLike] | Document | Span | str,
        prompt: ChatPromptTemplate | Prompt | PromptValue | str | Sequence[Any] | None = None,
        **options: Any,
    ) -> WarmReport:
        """`warm`, in a thread of its own."""
        return await asyncio.to_thread(self.warm, docs, prompt, **options)

    def explain(
        self, prompt: Prompt | PromptValue | str | Sequence[Any], **options: Any
    ) -> Explanation:
        """How a prompt is laid out, segment by segment, and what of it is cached now."""
        where = self._to_prompt(prompt)
        return self._get_engine().explain(where, **self._layout_options(options))

    def compare(
        self,
        prompt: Prompt | PromptValue | str | Sequence[Any],
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
        where = self._to_prompt(prompt)
        return self._get_engine().compare(where, techniques, max_tokens=max_tokens)

    def close(self) -> None:
        """Give the engine back: its memory is freed once no other open model shares it."""
        self._hold.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[Any, Any]:
        """Without any engine: where this is unpickled, the model finds or starts one."""
        state = super().__getstate__()
        state["__dict__"] = {**state["__dict__"], "engine": None}
        state["__pydantic_private__"] = {
            **(state["__pydantic_private__"] or {}),
            "_hold": EngineHold(),
        }
        return state

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy on the same engine, unless `update` asks for another."""
        copy = super().model_copy(update=update, deep=deep)
        copy._hold = self._hold.of_copy(self, copy)
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy on the same engine."""
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def _to_prompt(self, value: Any) -> Prompt:
        raise NotImplementedError
