"""LlamaIndex over the embedded engine: a query engine, a chat engine and an agent.

    python examples/llamaindex_rag.py [MODEL]

The first question computes the nodes; the next ones read them from the cache, wherever a prompt
has them. `cached` counts tokens read from it.
"""

# No `from __future__ import annotations`: LlamaIndex reads a tool's types as they are.

import asyncio
import sys
from typing import Literal

from llama_index.core import Settings
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.minipic import MiniPIC, install

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NODES = [
    TextNode(
        text=f"The {colour} box holds {thing}. It stands in room {room}, on the shelf by the "
        "window, and nobody but the caretaker has a key to that room.",
        id_=colour,
    )
    for colour, thing, room in (
        ("red", "coins", 11),
        ("blue", "letters", 12),
        ("green", "seeds", 13),
        ("white", "maps", 14),
    )
]


class Retriever(BaseRetriever):
    """Scores nodes by the words they share with the question: yours is better."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        words = set(query_bundle.query_str.lower().strip("?").split())
        scored = [
            NodeWithScore(node=node, score=len(words & set(node.text.lower().split())))
            for node in NODES
        ]
        return sorted(scored, key=lambda found: -(found.score or 0))


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else MODEL
    options = {"max_model_len": 2048, "kv_cache_gib": 0.25}
    llm = MiniPIC(model=model, engine_options=options, temperature=0, max_tokens=48)
    install(Settings, llm)

    query_engine = RetrieverQueryEngine.from_args(Retriever())
    print(f"warm: {llm.warm(NODES, query_engine)}")
    for question in ("What does the blue box hold?", "In which room is the white box?"):
        with llm.record() as calls:
            answer = query_engine.query(question)
        print(f"{question} {str(answer).strip()!r}")
        usage = calls[0].usage
        print(f"  {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached")

    chat = ContextChatEngine.from_defaults(retriever=Retriever(), system_prompt="Be brief.")
    for message in ("What does the red box hold?", "And the green one?"):
        with llm.record() as calls:
            pieces = list(chat.stream_chat(message).response_gen)
        print(f"{message} {''.join(pieces).strip()!r}")
        usage = calls[-1].usage
        print(f"  {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached")

    async def look_into(colour: Literal["red", "blue", "green", "white"]) -> str:
        """Tells what is in a box, and where it stands."""
        return str(await query_engine.aquery(f"What does the {colour} box hold?"))

    agent = FunctionAgent(
        tools=[look_into],
        system_prompt="Answer with the help of your tools.",
        initial_tool_choice="look_into",
        early_stopping_method="generate",
    )

    async def ask() -> None:
        with llm.record() as calls:
            output = await agent.run(user_msg="What does the blue box hold?", max_iterations=3)
        print(f"agent: {str(output).strip()!r}")
        for call in calls:
            print(f"  {call.usage.prompt_tokens} prompt tokens, {call.usage.cached_tokens} cached")

    asyncio.run(ask())
    llm.close()


if __name__ == "__main__":
    main()
