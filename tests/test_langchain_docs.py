"""What docs/langchain.md shows runs, and every name in it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import langchain_minipic
import langchain_minipic.middleware
import pytest
from langchain_minipic.messages import to_prompt
from langchain_support import ANSWER, Retriever

from minipic_backend import rank_spans
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


def test_what_to_choose_runs_on_documents_of_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/quality.md for documents without a useful order."""
    monkeypatch.setattr(shared_engines, "create_engine", lambda spec: FakeEngine(ANSWER))
    page = (ROOT / "docs" / "quality.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*rank_spans.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {
        "ChatMiniPIC": langchain_minipic.ChatMiniPIC,
        "documents": Retriever().invoke("Who?"),
        "question": "Who?",
        "model": "m",
        "prompt": langchain_minipic.SpanPromptTemplate.from_messages(
            [("human", "{context}\n\n{question}")]
        ),
    }
    exec(block, names)
    with names["llm"] as llm:
        assert set(llm.primer) == set(names["texts"])
        spans = to_prompt(names["ranked"].to_messages()).spans
        assert spans == tuple(rank_spans(names["texts"], "Who?"))
        assert sorted(span.rank for span in spans) == [0, 1, 2]
        assert llm.invoke(names["ranked"]).content == ANSWER


def test_every_name_is_there() -> None:
    offered = {*langchain_minipic.__all__, *langchain_minipic.middleware.__all__}
    assert {name for name in offered if name not in PAGE} == set()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
