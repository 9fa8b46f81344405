"""Compiles the paged kernels for an H200, without one; prints what their loops came out as.

Run by test_compile.py in a process of its own: under TRITON_INTERPRET nothing is compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minipic_backend.attention.geometry import AttentionShape, choose_geometry
from minipic_backend.attention.kernels.span_local import span_local_kernel
from minipic_backend.attention.kernels.unrotated import unrotated_kernel

BF16 = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")
FP8 = ("q_ptr", "k_ptr", "v_ptr")
FLOAT32 = ("part_ptr", "part_lse_ptr", "cos_sin_ptr")
SCALARS = ("score_factor", "q_factor", "soft_cap", "v_scale")
ALIGNED = (*BF16, *FLOAT32, "stride_q_token", "stride_q_head", "stride_out_token",
           "stride_out_head", "stride_block", "stride_slot", "stride_kv_head")  # fmt: skip


def compiled(kernel, constants, geometry, is_fp8):
    def type_of(name):
        if name in constants:
            return "constexpr"
        if is_fp8 and name in FP8:
            return "*fp8e4nv"
        if name in BF16:
            return "*bf16"
        if name in FLOAT32:
            return "*fp32"
        if name in SCALARS:
            return "fp32"
        return "*i32" if name.endswith("_ptr") else "i32"

    names = kernel.arg_names
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ALIGNED}
    constants = {name: value for name, value in constants.items() if name in names}
    source = ASTSource(kernel, {name: type_of(name) for name in names}, constants, attributes)
    options = {"num_warps": geometry.num_warps, "num_stages": geometry.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(kernel, num_queries, unrotated, is_fp8):
    shape = AttentionShape(32, 8, 128, 16, unrotated=unrotated)
    geometry = choose_geometry(shape, num_queries)
    constants = {
        "HEAD_SIZE": 128, "ROTARY_DIM": 128, "IS_NEOX": True, "BLOCK_SIZE": 16, "GROUP": 4,
        "BLOCK_M": geometry.block_m, "BLOCK_N": geometry.block_n, "BLOCK_D": 128,
        "BLOCK_HALF": 64, "BLOCK_REST": 16, "CAPPED": False, "WINDOWED": False,
        "IN_REGISTERS": geometry.block_m >= 64, "PRECISION": "tf32",
    }  # fmt: skip
    result = compiled(kernel, constants, geometry, is_fp8)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    buffers = re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x", result.asm["ttgir"])
    return {
        "name": f"{kernel.__name__} {num_queries}",
        "is_fp8": is_fp8,
        "shared_bytes": result.metadata.shared,
        "spilled_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "keys_in_flight": min(map(int, buffers)) * geometry.block_n,
        "loads": result.asm["ttgir"].count("async_copy_global_to_local"),
    }


if __name__ == "__main__":
    for kernel, unrotated in ((span_local_kernel, False), (unrotated_kernel, True)):
        for num_queries in (1, 50):
            for is_fp8 in (False, True):
                print(json.dumps(report(kernel, num_queries, unrotated, is_fp8)))
