"""Models of a shape: their folder is there while they are measured, and no longer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from minipic_backend.bench.engines import open_session
from minipic_backend.bench.models import SHAPES, model_arguments
from minipic_backend.cli import main
from minipic_backend.errors import ModelNotFoundError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def starting(seen: list[dict[str, Any]], outcome: type[BaseException]) -> Any:
    """Stands in for an engine, or its driver, that fails once it has seen its model."""

    def start(arguments: Any = None, /, **further: Any) -> Any:
        given = {**(arguments or {}), **further}
        folder = Path(given["model"])
        seen.append(json.loads((folder / "config.json").read_text()))
        raise outcome("while it started")

    return start


def test_a_named_model_needs_no_folder(temporary: Path) -> None:
    with model_arguments("some/name") as arguments:
        assert arguments == {"model": "some/name"}
        assert list(temporary.iterdir()) == []


def test_the_folder_of_a_shape_goes_at_the_end(temporary: Path) -> None:
    with model_arguments("shape:tiny") as arguments:
        folder = Path(arguments.pop("model"))
        assert arguments == {"load_format": "dummy", "skip_tokenizer_init": True}
        assert json.loads((folder / "config.json").read_text()) == SHAPES["tiny"]
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_no_folder_stays_where_the_tokenizer_is_not_found(temporary: Path) -> None:
    with pytest.raises(ModelNotFoundError), model_arguments("shape:tiny", "/nowhere/at/all"):
        pass
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("outcome", [RuntimeError, KeyboardInterrupt])
def test_no_folder_stays_where_an_engine_fails_or_is_interrupted(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, outcome: type[BaseException]
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("minipic_backend.bench.engines.EngineDriver", starting(seen, outcome))
    with pytest.raises(outcome), open_session("stock", "shape:tiny", {}):
        pass
    assert seen == [SHAPES["tiny"]]
    assert list(temporary.iterdir()) == []


def test_ctrl_c_leaves_no_folder_of_the_cost_bench(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, smollm2_tokenizer: Any
) -> None:
    tokenizer = temporary.parent / "tokenizer"
    smollm2_tokenizer.save_pretrained(tokenizer)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "minipic_backend.engines.embedded.Engine", starting(seen, KeyboardInterrupt)
    )
    command = ["bench", "cost", "--model", "shape:tiny", "--tokenizer", str(tokenizer)]
    assert main(command) == 130
    assert [config["vocab_size"] for config in seen] == [len(smollm2_tokenizer)]
    assert list(temporary.iterdir()) == []
