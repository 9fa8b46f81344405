"""LlamaIndex over the remote engine, in front of a server in a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import MODEL, FakeVLLM
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.llms import LLM
from llama_index.llms.minipic import MiniPIC, span_blocks
from llama_index.llms.minipic.testing import ChatEngineTests, LLMTests, ResponseModeTests

from minipic_backend import ConfigurationError, RemoteEngine
from minipic_backend.engines import shared as shared_engines

URL = "http://server.test/v1"
MESSAGES = [
    ChatMessage(
        blocks=[TextBlock(text="Use:\n"), *span_blocks("Some text."), TextBlock(text="Who?")]
    )
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MINIPIC_CACHE", str(tmp_path))
    monkeypatch.delenv("MINIPIC_API_KEY", raising=False)
    yield
    shared_engines.close_all()


class TestRemote(LLMTests, ResponseModeTests, ChatEngineTests):
    @pytest.fixture
    def llm(self) -> Iterator[LLM]:
        with RemoteEngine(URL, http=FakeVLLM()) as engine:
            yield MiniPIC(engine=engine)

    test_pickle = None  # an engine of one's own stays where it is


def by_address(server: FakeVLLM, **options: Any) -> MiniPIC:
    return MiniPIC(base_url=URL, engine_options={"http": server}, **options)


def test_by_address_alone() -> None:
    """Nothing is sent before it is needed, and nothing from inside an event loop."""
    server = FakeVLLM()
    llm = by_address(server)
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == URL
    assert not server.paths

    async def main() -> str | None:
        return (await llm.achat(MESSAGES)).message.content

    assert asyncio.run(main()) == "Teutberga"
    assert llm.metadata.context_window == 2048
    assert server.requests[0]["model"] == MODEL
    assert llm.chat(MESSAGES).raw["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    llm.close()


def test_what_is_sent_is_what_is_explained() -> None:
    server = FakeVLLM()
    with by_address(server, temperature=0, max_tokens=5) as llm:
        llm.chat(MESSAGES)
        explained = llm.explain(MESSAGES)
    assert [row.kind for row in explained.rows] == ["prefix", "span", "dependent"]
    (request,) = server.requests
    assert request["prompt"] == list(explained.token_ids)
    assert (request["temperature"], request["max_tokens"]) == (0, 5)


def test_options_of_an_embedded_engine_are_refused() -> None:
    llm = MiniPIC(base_url=URL, engine_options={"max_model_len": 5})
    with pytest.raises(ConfigurationError, match="max_model_len"):
        llm.chat(MESSAGES)
