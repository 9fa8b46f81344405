"""A fake engine for tests: no torch, no vLLM, the same answers every time.

engine = FakeEngine("Teutberga.")
llm = ChatMiniPIC(model="any", engine=engine)
llm.invoke("Who was the wife of Lothair II?")
engine.prompts[-1], engine.calls[-1].options
"""

from __future__ import annotations

from minipic_backend.testing._requests import FakeCall
from minipic_backend.testing.fake_engine import FakeEngine

__all__ = ["FakeCall", "FakeEngine"]
