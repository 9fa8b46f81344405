"""Fill a vector store and warm what goes into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import VectorStore

from langchain_minipic._base import EngineBacked
from minipic_backend import ConfigurationError, WarmReport

__all__ = ["index_and_warm"]


def index_and_warm(
    documents: Iterable[Document],
    *,
    llm: EngineBacked,
    prompt: ChatPromptTemplate | None = None,
    vector_store: VectorStore | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> WarmReport:
    """Adds a corpus to a vector store and computes its spans, batch by batch.

    Args:
        documents: any number; they are read as they are needed.
        llm: the model that will read them.
        prompt: the prompt they will stand in, as for `ChatMiniPIC.warm`.
        vector_store: where to add them; None: they are warmed only.
        batch_size: documents at a time.
        progress: show a progress bar.

    Returns:
        Totals over all batches. `details` are those of `ChatMiniPIC.warm`, and the vector store's
        "ids".

    Raises:
        ConfigurationError: batch_size is not positive.
        PromptError: documents that cannot be warmed; batches before it are in the store.
    """
    from tqdm.auto import tqdm

    if batch_size < 1:
        raise ConfigurationError(f"batch_size={batch_size}: at least 1")
    reports: list[WarmReport] = []
    ids: list[str] = []
    total = len(documents) if isinstance(documents, list | tuple) else None
    with tqdm(total=total, desc="Indexing", unit="document", disable=not progress) as bar:
        for batch in _batches(documents, batch_size):
            if vector_store is not None:
                ids += vector_store.add_documents(batch)
            reports.append(llm.warm(batch, prompt))
            bar.update(len(batch))
    return WarmReport(
        sum(report.num_spans for report in reports),
        sum(report.num_computed_tokens for report in reports),
        sum(report.num_cached_tokens for report in reports),
        sum(report.seconds for report in reports),
        {**(reports[0].details if reports else {}), "ids": ids},
    )


def _batches(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    source = iter(documents)
    while batch := list(islice(source, size)):
        yield batch
