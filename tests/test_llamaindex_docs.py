"""What docs/llamaindex.md shows runs, and every name in it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import llama_index.llms.minipic as package
import llama_index.llms.minipic.testing as suite
import pytest
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex

from minipic_backend.engines import shared as shared_engines
from minipic_backend.testing import FakeEngine

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "llamaindex.md").read_text()
LINK = re.compile(r"\]\((?!http)([^)#]+)[^)]*\)")


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shared_engines, "create_engine", lambda spec: FakeEngine("Teutberga."))
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=4))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 2
    documents = [Document(text=f"Text {place}.") for place in range(3)]
    names: dict[str, Any] = {
        "documents": documents,
        "embedding": MockEmbedding(embed_dim=4),
        "index": VectorStoreIndex.from_documents(documents),
        "pytest": pytest,
    }
    for block in blocks:
        exec(block, names)
    assert "Teutberga." in capsys.readouterr().out
    names["llm"].close()


def test_every_name_is_there() -> None:
    assert {name for name in package.__all__ if name not in PAGE} == set()
    assert all(getattr(package, name) for name in package.__all__)
    assert all(getattr(suite, name) for name in suite.__all__)


def test_every_link_leads_somewhere() -> None:
    links = LINK.findall(PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
