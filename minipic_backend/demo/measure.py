"""Cold and warm, for one question.

- Cold: nothing is cached.
- Warm: the documents were seen before, in another prompt, in another order, under another
  question. What is cached then is the system prompt and each document as a span; never the
  prompt that is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate

from minipic_backend.engines.embedded import Engine

__all__ = ["Answer", "Measurement", "Session"]

_PROMPT = SpanPromptTemplate.from_messages(
    [
        ("system", "You answer questions about Python. Use the documents given by the user."),
        ("human", "{context}\n\nAnswer this question in one sentence: {question}"),
    ]
)
_EARLIER_QUESTION = "What are these documents about?"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what it cost; `ttft_s` is the time to the first token, in seconds."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same question three times: `warm` with the default late document, `warm_all_spans`
    with every document as a span."""

    documents: tuple[Document, ...]
    cold: Answer
    warm: Answer
    warm_all_spans: Answer


class Session:
    """A chain over one engine.

    Args:
        engine: its cache is emptied by every measurement.
        retriever: gives the documents of a question, the best first.
        max_tokens: the most tokens of an answer.
    """

    STEPS = 5
    """Prompts of one measurement; `measure` reports each."""

    WARM_UP_STEPS = 2

    def __init__(self, engine: Engine, retriever: BaseRetriever, *, max_tokens: int = 40) -> None:
        self._engine = engine
        self._retriever = retriever
        self._llm = ChatMiniPIC(
            model=engine.model, engine=engine, temperature=0.0, max_tokens=max_tokens, stop=["\n"]
        )

    def warm_up(self, on_step: Callable[[], object] = lambda: None) -> None:
        """Prompts that are not counted: a process's first ones pay for threads and memory."""
        question = "What is Python?"
        self._ask_after(self._retriever.invoke(question), question, on_step)

    def measure(self, question: str, on_step: Callable[[], object] = lambda: None) -> Measurement:
        documents = self._retriever.invoke(question)
        self._engine.reset_cache()
        cold = self._ask(question)
        on_step()
        warm = self._ask_after(documents, question, on_step)
        warm_all_spans = self._ask_after(documents, question, on_step, late=0)
        return Measurement(tuple(documents), cold, warm, warm_all_spans)

    def _ask_after(
        self,
        documents: list[Document],
        question: str,
        on_step: Callable[[], object],
        **options: Any,
    ) -> Answer:
        """The answer to a question whose documents an earlier prompt held, in reverse order."""
        self._engine.reset_cache()
        earlier = _PROMPT.invoke({"context": documents[::-1], "question": _EARLIER_QUESTION})
        self._llm.invoke(earlier, late=0, max_tokens=1)
        on_step()
        answer = self._ask(question, **options)
        on_step()
        return answer

    def _ask(self, question: str, **options: Any) -> Answer:
        llm = self._llm.bind(**options)
        context = {"context": self._retriever, "question": RunnablePassthrough()}
        chain = context | _PROMPT | llm
        return _read(chain.invoke(question))


def _read(message: AIMessage) -> Answer:
    usage: Any = message.usage_metadata
    return Answer(
        text=" ".join(str(message.content).split()),
        prompt_tokens=usage["input_tokens"],
        cached_tokens=usage["input_token_details"].get("cache_read", 0),
        ttft_s=message.response_metadata["ttft_s"],
    )
