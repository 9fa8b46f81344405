"""Triton kernels compiled side by side, in threads, ahead of their first launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["compile_together"]

_MAX_THREADS = 8


def compile_together(
    kernels: Sequence[Any], launch: Callable[[], None], num_threads: int | None = None
) -> int:
    """Compiles what `launch` would compile one after another; no kernel runs.

    Args:
        kernels: all that `launch` launches.
        launch: calls launchers; what these return is not computed.
        num_threads: compilations at a time; None: as many as there are CPU cores, up to 8.

    Returns:
        How many compilations that were; 0 where Triton cannot (under its interpreter, or without
        its asynchronous mode, which is private): kernels then compile at their first launch.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode  # type: ignore[import-untyped]
        from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]  # Triton is not typed
    except ImportError:
        return 0
    if not all(isinstance(kernel, JITFunction) for kernel in kernels):
        return 0
    threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool) as mode:
        with _compiled_only(kernels):
            launch()
        return len(mode.future_kernels)


@contextmanager
def _compiled_only(kernels: Sequence[Any]) -> Iterator[None]:
    """Makes `kernel[grid](…)` what `kernel.warmup(…)` is, with tensors for arguments."""

    def without_launch(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run(*args, **{**kwargs, "warmup": True})

    before = [vars(kernel).get("run") for kernel in kernels]
    for kernel in kernels:
        kernel.run = without_launch(kernel.run)
    try:
        yield
    finally:
        for kernel, run in zip(kernels, before, strict=True):
            del kernel.run
            if run is not None:
                kernel.run = run
