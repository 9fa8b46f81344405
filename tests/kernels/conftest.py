"""Kernels run on the GPU where there is one, and under Triton's interpreter where there is none."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available() and not IS_INTERPRETED:
        return "cuda"
    if not IS_INTERPRETED:
        pytest.skip(
            "Triton was imported before TRITON_INTERPRET=1 was set: run tests/kernels alone"
        )
    return "cpu"
