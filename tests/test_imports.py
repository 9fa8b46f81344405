"""Laying out, hashing and calling engines costs no import of torch or vLLM until one starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = [
    "minipic_backend",
    "minipic_backend.layout.prompt_layout",
    "minipic_backend.layout.markers",
    "minipic_backend.spans.segments",
    "minipic_backend.spans.hashing",
    "minipic_backend.engines.base",
    "minipic_backend.engines.embedded",
    "minipic_backend.engines.driver",
    "minipic_backend.testing",
    "minipic_backend.cli",
    "minipic_backend.plugin",
    "minipic_backend.remote",
    "langchain_minipic",
]
HEAVY = {"torch", "vllm"}


@pytest.mark.parametrize("module", LIGHT)
def test_module_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert HEAVY.isdisjoint(done.stdout.split())


def test_the_check_can_fail() -> None:
    code = "import sys, torch; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert not HEAVY.isdisjoint(done.stdout.split())


def test_names_are_there_and_no_others() -> None:
    import minipic_backend

    for name in minipic_backend.__all__:
        assert getattr(minipic_backend, name) is not None
    with pytest.raises(AttributeError):
        _ = minipic_backend.NoSuchName  # type: ignore[attr-defined]
