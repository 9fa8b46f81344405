"""What the compiler makes of the paged kernels for an H200, checked without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")


def run_on_its_own(script: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """What a script of this folder prints, compiling for real."""
    path = Path(__file__).with_name(script)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    root = str(path.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@linux
def test_key_tiles_are_copied_ahead_and_decode_does_not_spill():
    """A loop that loses its pipeline is right, and several times slower."""
    reports = run_on_its_own("compile_for_hopper.py")
    assert len(reports) == 8
    for report in reports:
        is_decode = report["name"].endswith(" 1")
        assert report["loads"] > 0, report
        assert report["keys_in_flight"] >= (128 if is_decode else 64), report
        assert report["spilled_bytes"] <= (16 * report["is_fp8"] if is_decode else 256), report
        # Two thread blocks of decode must fit on a multiprocessor, 228 KiB with 1 KiB each.
        assert report["shared_bytes"] <= (113 if is_decode else 227) * 1024, report


@linux
def test_a_start_up_compiles_few_kernels_and_each_once():
    """Four sizes of attention, two of merging, three and four of planning, one of copies."""
    reports = run_on_its_own("warm_up_for_hopper.py", "2")
    # The later ones find what plans and merges compiled already.
    assert [(report["name"], report["count"]) for report in reports] == [
        ("span_local", 14), ("unrotated", 4), ("span_local fp8", 4),
    ]  # fmt: skip
