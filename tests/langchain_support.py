"""What the tests of the LangChain classes share: documents, a retriever, ways to read streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk
from langchain_core.retrievers import BaseRetriever

DOCUMENTS = [
    Document("Lothair II was a king.", id="lothair"),
    Document("Teutberga was his queen."),
    Document("Waldrada came after her."),
]
ANSWER = "Her name was Teutberga."


class Retriever(BaseRetriever):
    """Gives the documents in an order that depends on the question."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return DOCUMENTS[len(query) % 3 :] + DOCUMENTS[: len(query) % 3]


def last_of(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def collect(stream: AsyncIterator[AIMessageChunk]) -> list[AIMessageChunk]:
    async def main() -> list[AIMessageChunk]:
        return [chunk async for chunk in stream]

    return asyncio.run(main())
