"""What the compiler makes of the paged kernels for an H200, checked without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_key_tiles_are_copied_ahead_and_decode_does_not_spill():
    """A loop that loses its pipeline is right, and several times slower."""
    script = Path(__file__).with_name("compile_for_hopper.py")
    root = script.parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True,
        env=environment | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 8
    for report in reports:
        is_decode = report["name"].endswith(" 1")
        assert report["loads"] > 0, report
        assert report["keys_in_flight"] >= (128 if is_decode else 64), report
        assert report["spilled_bytes"] <= (16 * report["is_fp8"] if is_decode else 256), report
        # Two thread blocks of decode must fit on a multiprocessor, 228 KiB with 1 KiB each.
        assert report["shared_bytes"] <= (113 if is_decode else 227) * 1024, report
