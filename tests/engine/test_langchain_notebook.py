"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


@pytest.mark.usefixtures("on_path")
def test_notebook_runs() -> None:
    notebook = nbformat.read(ROOT / "examples" / "langchain_rag.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    assert "'cache_read': " in shown
    assert "warm" in shown
    assert "Box(colour=" in shown
