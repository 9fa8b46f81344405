"""The examples run as they stand, the notebook from its first cell to its last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from side_by_side import PACKAGES, python

EXAMPLES = Path(__file__).parents[2] / "examples"
# Those that want a server run in tests/server.
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if not path.stem.startswith("serve_"))


def test_there_are_examples() -> None:
    assert {path.stem for path in SCRIPTS} >= {"engine", "langchain_rag"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.process(run=python(p)), id=p.stem) for p in SCRIPTS],
)
def test_example_runs(path: Path, done: Any) -> None:
    assert done.returncode == 0, done.stderr[-2000:]
    assert "warm" in done.stdout


def execute(folder: Path, model: str) -> Any:
    notebook = nbformat.read(EXAMPLES / "langchain_rag.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(env={**os.environ, "PYTHONPATH": PACKAGES})
    return notebook


@pytest.mark.process(run=execute)
def test_notebook_runs(done: Any) -> None:
    shown = "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for cell in done.cells
        for output in cell.get("outputs", ())
    )
    assert "'cache_read': " in shown
    assert "warm" in shown
    assert "Box(colour=" in shown
