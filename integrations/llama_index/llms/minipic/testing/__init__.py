"""A conformance suite for LlamaIndex models, of whatever make: LlamaIndex itself has none.

    from llama_index.llms.minipic.testing import ChatEngineTests, LLMTests, ResponseModeTests

    class TestMyModel(LLMTests, ResponseModeTests, ChatEngineTests):
        @pytest.fixture
        def llm(self) -> LLM:
            return MyModel(…)

Every response mode and every chat engine runs sync, async, streamed, and streamed async. Needs
pytest; no plugin for asyncio.
"""

from __future__ import annotations

from llama_index.llms.minipic.testing.chat_engines import ChatEngineTests
from llama_index.llms.minipic.testing.llm import LLMTests
from llama_index.llms.minipic.testing.prompts_seen import PromptsSeen
from llama_index.llms.minipic.testing.response_modes import ResponseModeTests
from llama_index.llms.minipic.testing.retrieving import HOSTILE_NODES, NODES, GivenNodes
from llama_index.llms.minipic.testing.ways import WAYS, Answer, Way, ask, say

__all__ = [
    "HOSTILE_NODES",
    "NODES",
    "WAYS",
    "Answer",
    "ChatEngineTests",
    "GivenNodes",
    "LLMTests",
    "PromptsSeen",
    "ResponseModeTests",
    "Way",
    "ask",
    "say",
]
