"""Compiles what a start-up compiles, for an H200 without one; prints how many kernels that were.

Run by test_compile.py in a process of its own: under TRITON_INTERPRET nothing is compiled.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from minipic_backend.attention import dispatch, warmup
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rotary import Rotary, cos_sin_table


class _Hopper:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class _NoLaunchError(Exception):
    pass


def compiled(shape, num_threads, **options):
    """Compilations, and their seconds."""
    together = warmup.compile_together
    found = []

    def watched(kernels, launch):
        start = time.perf_counter()
        count = together(kernels, launch, num_threads)
        found.append((count, time.perf_counter() - start))
        assert together(kernels, launch, num_threads) == 0, "compiled twice"
        raise _NoLaunchError  # there is nothing to launch on

    warmup.compile_together = watched
    cache = torch.zeros(4, shape.block_size, shape.num_kv_heads, shape.head_size)
    cache = cache.to(options.pop("cache_dtype", torch.bfloat16))
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, shape.head_size, 2) / shape.head_size)
    try:
        warmup.warm_up(
            shape, cache, cache, Rotary(cos_sin_table(inv_freq, 64), True), dtype=torch.bfloat16,
            max_reqs=256, max_tokens=8192, scale=0.1, **options,
        )  # fmt: skip
    except _NoLaunchError:
        pass
    finally:
        warmup.compile_together = together
    return found[0]


if __name__ == "__main__":
    driver.set_active(_Hopper())
    dispatch._num_sms = lambda device: 132
    threads = int(sys.argv[1])
    for name, unrotated, fp8 in (
        ("span_local", False, False),
        ("unrotated", True, False),
        ("span_local fp8", False, True),
    ):
        e4m3 = torch.float8_e4m3fn
        options = (
            {"query_dtype": e4m3, "cache_dtype": e4m3} if fp8 else {"attend": lambda **_: None}
        )
        count, seconds = compiled(
            AttentionShape(32, 8, 128, 16, unrotated=unrotated), threads, **options
        )
        print(json.dumps({"name": name, "count": count, "seconds": round(seconds, 2)}))
