"""Triton kernels compiled side by side, in threads, ahead of their first launch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["compile_together"]

_MAX_THREADS = 8
_log = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers of its own name only


def compile_together(
    kernels: Sequence[Any], launch: Callable[[], None], num_threads: int | None = None
) -> int:
    """Compiles what `launch` would compile one after another; no kernel runs.

    Args:
        kernels: all that `launch` launches.
        launch: calls launchers; what these return is not computed.
        num_threads: compilations at a time; None: as many as there are CPU cores, up to 8.

    Returns:
        How many compilations that were; 0 where Triton cannot (under its interpreter, or where its
        asynchronous mode, which is private, is not what we know): kernels then compile at their
        first launch, one after another. What else fails here fails there again, for all to see.
    """
    try:
        return _compile(kernels, launch, num_threads or min(_MAX_THREADS, os.cpu_count() or 1))
    except Exception as error:
        _log.info("Kernels are compiled one after another (%s: %s)", type(error).__name__, error)
        return 0


def _compile(kernels: Sequence[Any], launch: Callable[[], None], num_threads: int) -> int:
    """Everything that touches Triton's private mode; raises whatever a changed one leads to."""
    from triton.runtime._async_compile import AsyncCompileMode  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]  # Triton is not typed

    if not all(isinstance(kernel, JITFunction) for kernel in kernels):
        return 0
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool) as mode:
        with _compiled_only(kernels):
            launch()
        return len(mode.future_kernels)


@contextmanager
def _compiled_only(kernels: Sequence[Any]) -> Iterator[None]:
    """Makes `kernel[grid](…)` what `kernel.warmup(…)` is, with tensors for arguments."""

    def without_launch(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run(*args, **{**kwargs, "warmup": True})

    before = [vars(kernel).get("run") for kernel in kernels]
    try:
        for kernel in kernels:
            kernel.run = without_launch(kernel.run)
        yield
    finally:
        for kernel, run in zip(kernels, before, strict=True):
            vars(kernel).pop("run", None)
            if run is not None:
                kernel.run = run
