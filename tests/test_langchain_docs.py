"""What docs/langchain.md shows runs, and every name in it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import langchain_minipic
import langchain_minipic.middleware
import pytest
from langchain_support import ANSWER, Retriever

from minipic_backend.engines import shared as shared_engines
from minipic_backend.testing import FakeEngine

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "langchain.md").read_text()


@pytest.mark.parametrize("page", ["docs/langchain.md", "README.md"])
def test_the_code_runs(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.setattr(shared_engines, "create_engine", lambda spec: FakeEngine(ANSWER))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {"retriever": Retriever()}
    for block in blocks:
        exec(block, names)
    assert names["chain"].invoke("Who?").content == ANSWER
    names["llm"].close()


def test_every_name_is_there() -> None:
    offered = {*langchain_minipic.__all__, *langchain_minipic.middleware.__all__}
    assert {name for name in offered if name not in PAGE} == set()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
