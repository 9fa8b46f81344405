"""Kernels run on the GPU where there is one, and under Triton's interpreter where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _teach_interpreter_bfloat16() -> None:
    """bfloat16 as on a GPU: in Triton 3.6 to 3.9 the interpreter truncates where a GPU rounds, and
    its dot multiplies bit patterns."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return widened(src)
        if pair == (tl.float32, tl.bfloat16):
            bits = src.data.view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = np.where(np.isnan(src.data), 0x7FC0, rounded)
            return TensorHandle(rounded.astype(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(self, widened(a), widened(b), *args)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


if IS_INTERPRETED:
    _teach_interpreter_bfloat16()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, `-m gpu` means these, too."""
    if torch.cuda.is_available() and not IS_INTERPRETED:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> str:
    if IS_INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("Triton was imported before TRITON_INTERPRET=1 was set: run tests/kernels alone")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels allocate holds NaN until they write it."""

    def poisoned(function: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = function(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(-7)

        return allocate

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
