"""`compare` of the LlamaIndex class."""

from __future__ import annotations

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.minipic import MiniPIC

from minipic_backend import Prompt
from minipic_backend.testing import FakeEngine


@pytest.mark.parametrize("prompt", ["x", [ChatMessage(content="x")], Prompt("x")])
def test_compare_shows_each_techniques_answer(prompt: object) -> None:
    engine = FakeEngine()
    llm = MiniPIC(model="m", engine=engine)
    comparison = llm.compare(prompt, ["primed", "block_attention"], max_tokens=3)  # type: ignore[arg-type]
    assert [answer.technique for answer in comparison.answers] == ["primed", "block_attention"]
    assert [call.options["technique"] for call in engine.calls] == [
        "full",
        "primed",
        "block_attention",
    ]
