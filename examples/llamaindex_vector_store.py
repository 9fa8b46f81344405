"""A vector store on disk, and spans that are warm again after a restart.

    python examples/llamaindex_vector_store.py [MODEL]

Nodes are warmed at the end of the ingestion. A KV cache dies with its engine: after a restart the
nodes of the store are warmed anew, which is one call.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any
from zlib import crc32

from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.minipic import MiniPIC, SpanWarmer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DOCUMENTS = [
    Document(
        text=f"The {colour} box holds {thing}. It stands in room {room}, on the shelf by the "
        "window, and nobody but the caretaker has a key to that room.",
        metadata={"title": f"The {colour} box", "room": room},
    )
    for colour, thing, room in (
        ("red", "coins", 11),
        ("blue", "letters", 12),
        ("green", "seeds", 13),
        ("white", "maps", 14),
    )
]


class WordEmbedding(BaseEmbedding):
    """Counts words, without a model: yours is better."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 256
        for word in text.lower().split():
            vector[crc32(word.strip(".,?").encode()) % 256] += 1.0
        return vector

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def ask(llm: MiniPIC, index: Any, question: str) -> None:
    engine = index.as_query_engine(llm=llm, similarity_top_k=3)
    with llm.record() as calls:
        answer = engine.query(question)
    usage = calls[0].usage
    print(f"{question} {str(answer).strip()!r}")
    print(f"  {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else MODEL
    options = {"max_model_len": 2048, "kv_cache_gib": 0.25}
    embedding = WordEmbedding()

    with tempfile.TemporaryDirectory() as folder:
        with MiniPIC(model=model, engine_options=options, temperature=0, max_tokens=16) as llm:
            pipeline = IngestionPipeline(
                transformations=[
                    SentenceSplitter(chunk_size=128, chunk_overlap=0),
                    embedding,
                    SpanWarmer(llm=llm),
                ]
            )
            nodes = pipeline.run(documents=DOCUMENTS)
            index = VectorStoreIndex(nodes, embed_model=embedding)
            ask(llm, index, "What does the blue box hold?")
            index.storage_context.persist(folder)

        print("restart")
        with MiniPIC(model=model, engine_options=options, temperature=0, max_tokens=16) as llm:
            storage = StorageContext.from_defaults(persist_dir=folder)
            index = load_index_from_storage(storage, embed_model=embedding)
            report = llm.warm(index.docstore.docs.values(), progress=True)
            print(f"warm again: {report.num_spans} nodes in {report.seconds:.1f} s")
            ask(llm, index, "What does the blue box hold?")


if __name__ == "__main__":
    main()
