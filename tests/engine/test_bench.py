"""`minipic bench` on the real small model: every figure, both engines, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMAND = """
    bench throughput ttft decode --compare stock --runs 1 --samples 2 --documents 3
    --document-tokens 40 --decode 2x96,1x160:2 --max-model-len 2048
"""


def test_it_measures_stock_and_spans(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "minipic_backend.cli", *COMMAND.split(), "--json", str(target)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(target.read_text())
    assert content["about"]["vllm"]
    assert str(target) not in str(content)
    rows = {(row["bench"], row["case"], row["variant"]): row for row in content["rows"]}
    assert all(row["median"] > 0 for row in rows.values())
    for bench, case in [
        ("capacity", "KV cache"),
        ("throughput", "no spans"),
        ("ttft", "3 x 40: cold, no spans"),
        ("ttft", "3 x 40: exact prefix, no spans"),
        ("decode", "2 x 96, no spans"),
    ]:
        assert {(bench, case, "stock"), (bench, case, "span_local")} <= set(rows)
    # The documents, padded to blocks of 32, and the prefix; in another order than before.
    warm = rows["ttft", "3 x 40: warm spans", "span_local"]
    assert warm["details"]["cached"] == 64 + 3 * 64
    assert rows["ttft", "3 x 40: cold spans", "span_local"]["details"]["cached"] == 64
    capacity = [row["median"] for key, row in rows.items() if key[0] == "capacity"]
    assert abs(capacity[0] / capacity[1] - 1) <= 0.01
    assert "span_local" in done.stdout
    assert "/ stock" in done.stdout
