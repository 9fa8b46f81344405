"""LlamaIndex over a server: what must come from its cache does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.llms.minipic import MiniPIC
from llama_index.llms.minipic.testing import LLMTests
from llamaindex_bench import NODES, ReadsNodes

process = pytest.importorskip("process", reason="tests/server has no server of its own yet")


class TestReadsNodes(ReadsNodes):
    ways = ("sync", "astream")

    @pytest.fixture
    def engine(self, remote: Any) -> Any:
        return remote


class TestConformance(LLMTests):
    max_gap_s = 2.0  # the server shares two cores with the event loop

    @pytest.fixture
    def llm(self, remote: Any) -> LLM:
        return MiniPIC(engine=remote, temperature=0, max_tokens=8)


def test_by_address(server: Any) -> None:
    with MiniPIC(
        base_url=server.base_url, api_key=process.API_KEY, temperature=0, max_tokens=8
    ) as llm:
        assert llm.metadata.context_window == 2048
        message = [ChatMessage(content="Name a colour.")]
        whole = llm.chat(message)
        assert asyncio.run(llm.achat(message)).message.content == whole.message.content
        streamed = list(llm.stream_chat(message))
        assert streamed[-1].message.content == whole.message.content
        assert streamed[-1].raw["usage"]["completion_tokens"] > 0
        assert llm.warm(NODES).num_spans == len(NODES)
