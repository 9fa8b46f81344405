"""A retriever that computes documents while the rest of the chain is still at work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field, PrivateAttr

from langchain_minipic._base import EngineBacked

__all__ = ["WarmingRetriever"]

_logger = logging.getLogger(__name__)
_pool = ThreadPoolExecutor(4, thread_name_prefix="minipic-warm")


class WarmingRetriever(BaseRetriever):
    """Wraps a retriever: what it finds is warmed at once, in the background.

        found = WarmingRetriever(retriever=vectors.as_retriever(), llm=llm, prompt=prompt)
        best = ContextualCompressionRetriever(base_retriever=found, base_compressor=reranker)

    Prefill then overlaps with whatever stands between retrieval and the model: a reranker,
    a second retriever of an ensemble, another chain. It returns as soon as the wrapped retriever
    does. Where warming fails, a warning is logged, and the model computes the documents itself.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: BaseRetriever
    """Finds the documents."""

    llm: EngineBacked
    """The model that will read them."""

    prompt: ChatPromptTemplate | None = Field(default=None)
    """The prompt they will stand in, as for `ChatMiniPIC.warm`. A variable in front of the
    documents has to be filled in."""

    k: int | None = None
    """How many documents to keep, at most. That of a call goes to the wrapped retriever too."""

    _pending: set[Future[None]] = PrivateAttr(default_factory=set)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        config = RunnableConfig(callbacks=run_manager.get_child())
        found = self.retriever.invoke(query, config, **kwargs)
        return self._warmed(found, kwargs.get("k", self.k))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        config = RunnableConfig(callbacks=run_manager.get_child())
        found = await self.retriever.ainvoke(query, config, **kwargs)
        return self._warmed(found, kwargs.get("k", self.k))

    def _warmed(self, found: Sequence[Document], k: int | None) -> list[Document]:
        documents = list(found[:k])
        if documents:
            future = _pool.submit(self._warm, documents)
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
        return documents

    def _warm(self, documents: list[Document]) -> None:
        try:
            self.llm.warm(documents, self.prompt)
        except Exception as error:  # whatever it is, the model meets it again, where it counts
            _logger.warning("Documents were not warmed: %s", error)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything that was found so far is warm, at most `timeout` seconds."""
        wait(list(self._pending), timeout)
