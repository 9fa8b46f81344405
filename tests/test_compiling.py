"""Compiling side by side where Triton's private mode is not the one that we know."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

from minipic_backend.attention.compiling import compile_together


class Kernel:
    """As much of a `JITFunction` as a launch needs."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool) -> None:
        self.seen.append({"args": args, "grid": grid, "warmup": warmup})

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args: self.run(*args, grid=grid, warmup=False)


class Mode:
    """The mode as it is today; `Kernel` does not ask for it."""

    def __init__(self, executor: Any) -> None:
        self.future_kernels = {"one": 1, "two": 2}

    def __enter__(self) -> Mode:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class OtherArguments(Mode):
    def __init__(self, executor: Any, cache: Any) -> None:
        raise AssertionError("unreachable")


class OtherAttribute(Mode):
    def __init__(self, executor: Any) -> None:
        self.kernels = {"one": 1}


class NoContext:
    def __init__(self, executor: Any) -> None:
        pass


class AnotherIsActive(Mode):
    def __enter__(self) -> Mode:
        raise RuntimeError("Another AsyncCompileMode is already active")


class FailsAtTheEnd(Mode):
    def __exit__(self, *error: object) -> None:
        raise OSError("no room for a kernel")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[type | None], None]:
    """Makes a class Triton's mode; None: it has none under that name."""
    monkeypatch.setattr("triton.runtime.jit.JITFunction", Kernel)

    def install(mode: type | None) -> None:
        module = ModuleType("triton.runtime._async_compile")
        if mode is not None:
            module.AsyncCompileMode = mode  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_nothing_is_run_in_the_mode_that_we_know(install: Callable[[type | None], None]) -> None:
    install(Mode)
    kernel = Kernel()
    assert compile_together([kernel], lambda: kernel[3]("a")) == 2
    kernel[4]("b")
    assert kernel.seen == [
        {"args": ("a",), "grid": 3, "warmup": True},
        {"args": ("b",), "grid": 4, "warmup": False},
    ]


@pytest.mark.parametrize(
    "mode", [None, OtherArguments, OtherAttribute, NoContext, AnotherIsActive, FailsAtTheEnd]
)
def test_another_mode_leaves_kernels_to_their_first_launch(
    install: Callable[[type | None], None], mode: type | None, caplog: pytest.LogCaptureFixture
) -> None:
    install(mode)
    kernel = Kernel()
    logger = logging.getLogger("vllm.minipic_backend.attention.compiling")
    logger.addHandler(caplog.handler)  # vLLM's loggers do not pass on to the root
    try:
        with caplog.at_level(logging.INFO, logger.name):
            assert compile_together([kernel], lambda: kernel[3]("a")) == 0
    finally:
        logger.removeHandler(caplog.handler)
    assert "one after another" in caplog.text
    before = len(kernel.seen)
    kernel[4]("b")
    assert kernel.seen[before:] == [{"args": ("b",), "grid": 4, "warmup": False}]


def test_launches_that_cannot_only_compile(install: Callable[[type | None], None]) -> None:
    """A `run` that knows no `warmup`: what fails is left to the first launch, and nothing stays."""
    install(Mode)

    class Renamed(Kernel):
        def run(self, *args: Any, grid: Any) -> None:  # type: ignore[override]
            self.seen.append({"args": args, "grid": grid})

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args: self.run(*args, grid=grid)

    kernel = Renamed()
    assert compile_together([Kernel(), kernel], lambda: kernel[3]("a")) == 0
    kernel[4]("b")
    assert kernel.seen == [{"args": ("b",), "grid": 4}]


def test_the_interpreter_compiles_nothing(install: Callable[[type | None], None]) -> None:
    install(Mode)
    assert compile_together([object()], lambda: pytest.fail("launched")) == 0
