"""ChatMiniPIC and LlamaIndex's MiniPIC on a server: one argument more."""

from __future__ import annotations

from typing import Any

from documents import fresh
from langchain_core.messages import HumanMessage
from langchain_minipic import ChatMiniPIC
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.llms.minipic import MiniPIC
from process import API_KEY, ServerProcess

from minipic_backend.models import HUB_NAME

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "late": 0}


def marked(documents: list[str]) -> list[Any]:
    spans = [
        {"type": "text", "text": text, "extras": {"minipic": {"span": True}}} for text in documents
    ]
    return [*spans, {"type": "text", "text": "What is this about?"}]


async def test_langchain(server: ServerProcess) -> None:
    documents = fresh(3)
    with ChatMiniPIC(
        model=HUB_NAME,
        base_url=server.base_url,
        api_key=API_KEY,
        headers={"x-team": "a"},
        **OPTIONS,
    ) as llm:
        cold = llm.invoke([HumanMessage(marked(documents))])
        warm = await llm.ainvoke([HumanMessage(marked(documents[::-1]))])
        assert warm.usage_metadata is not None
        assert cold.usage_metadata is not None
        details = warm.usage_metadata["input_token_details"]
        assert details["cache_read"] > 3 * 64
        assert details["cache_creation"] < 64
        pieces = [chunk async for chunk in llm.astream([HumanMessage(marked(documents[::-1]))])]
        assert "".join(str(piece.content) for piece in pieces) == warm.content


def test_llamaindex(server: ServerProcess) -> None:
    llm = MiniPIC(model=HUB_NAME, base_url=server.base_url, api_key=API_KEY, **OPTIONS)
    message = ChatMessage(role="user", blocks=[TextBlock(text="What is the capital of France?")])
    answer = llm.chat([message]).message.content
    assert answer
    *_, last = llm.stream_chat([message])
    assert last.message.content == answer
    assert llm.metadata.context_window == 2048
    llm.close()
