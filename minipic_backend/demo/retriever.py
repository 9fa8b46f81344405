"""A real retriever over the demo's passages: BM25, by the library bm25s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import bm25s
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import PrivateAttr

from minipic_backend.demo.corpus import Passage

__all__ = ["PassageRetriever"]


class PassageRetriever(BaseRetriever):
    """The `k` passages that share most with the question, the best first.

    Build it with `PassageRetriever.over(passages)`.
    """

    k: int = 10
    _passages: list[Passage] = PrivateAttr(default_factory=list)
    _index: Any = PrivateAttr(default=None)

    @classmethod
    def over(cls, passages: Sequence[Passage], *, k: int = 10) -> Self:
        """Indexes the passages (some 50 ms for 500).

        Raises:
            ValueError: fewer passages than `k`.
        """
        if not 1 <= k <= len(passages):
            raise ValueError(f"k={k}: from 1 to the number of passages, {len(passages)}")
        retriever = cls(k=k)
        retriever._passages = list(passages)
        retriever._index = bm25s.BM25()
        retriever._index.index(
            _tokenize([passage.content for passage in passages]), show_progress=False
        )
        return retriever

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        numbers, scores = self._index.retrieve(_tokenize([query]), k=self.k, show_progress=False)
        found = [
            (self._passages[number], score)
            for number, score in zip(numbers[0], scores[0], strict=True)
        ]
        return [
            Document(
                id=passage.id,
                page_content=passage.content,
                metadata={"title": passage.title, "score": float(score)},
            )
            for passage, score in found
        ]


def _tokenize(texts: list[str]) -> Any:
    return bm25s.tokenize(texts, stopwords="en", show_progress=False)
