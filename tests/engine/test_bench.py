"""`minipic bench` on the real small model: every figure, both engines, JSON; and what techniques
cost, on a tiny one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from side_by_side import python
from tqdm import tqdm

COMMAND = """
    bench throughput ttft decode --compare stock --runs 1 --samples 2 --documents 3
    --document-tokens 40 --decode 2x96,1x160:2 --max-model-len 2048
"""
TECHNIQUE = "block_attention"


def measure(folder: Path, model: str) -> Any:
    """The command, and the figures that it wrote."""
    target = folder / "figures.json"
    command = python("-m", "minipic_backend.cli", *COMMAND.split(), "--json", target, timeout=500)
    return command(folder, model), target


@pytest.mark.process(run=measure)
def test_it_measures_stock_and_spans(done: Any) -> None:
    command, target = done
    assert command.returncode == 0, command.stderr[-3000:]
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
    assert "span_local" in command.stdout
    assert "/ stock" in command.stdout


def test_it_measures_what_techniques_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from minipic_backend.bench import cost_command
    from minipic_backend.cli import main

    bars: list[Any] = []

    def bar(total: int, unit: str) -> Any:
        bars.append(tqdm(total=total, unit=unit, file=io.StringIO()))
        return bars[-1]

    monkeypatch.setattr(cost_command, "progress_bar", bar)
    target, plot = tmp_path / "figures.json", tmp_path / "figures.png"
    command = """
        bench cost --model shape:tiny --documents 3 --document-tokens 60,150 --sample 2
        --prompts 4,3 --runs 2 --techniques full primed block_attention --max-model-len 2048
    """
    assert main([*command.split(), "--json", str(target), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    content = json.loads(target.read_text())
    assert content["about"]["model"] == "shape:tiny"
    assert [(one.n, one.total) for one in bars] == [(1 + len(content["rows"]),) * 2]
    rows = {(row["bench"], row["case"], row["variant"]): row for row in content["rows"]}
    shown = capsys.readouterr().out
    for size, prompts in (60, 4), (150, 3):
        found = {
            (bench, technique): rows.pop((bench, f"3 x {size}", technique))
            for bench in ("anew", "ttft", "throughput")
            for technique in ("full", "primed", TECHNIQUE)
        }
        assert all(min(row["values"]) > 0 for row in found.values())
        tokens = {name: found["anew", name]["details"] for name in ("full", "primed", TECHNIQUE)}
        plain = tokens["full"]["plain_tokens"]
        assert all(one["plain_tokens"] == plain for one in tokens.values())  # the same prompts
        assert 0 < plain - 3 * size < 90
        # Nothing but one block in front of the documents is reused.
        assert plain - tokens["full"]["computed_tokens"] == 32
        question, late = (tokens[name]["computed_tokens"] for name in (TECHNIQUE, "primed"))
        assert 10 < question < 40
        assert size <= late - question < size + 8
        share = sum(found["anew", "primed"]["values"]) / 2
        assert share == pytest.approx(late / plain, rel=0.02)
        assert [len(found[bench, "full"]["values"]) for bench in ("ttft", "throughput")] == [2, 2]
        for technique in ("full", "primed", TECHNIQUE):
            details = found["throughput", technique]["details"]
            assert details["prompts"] == prompts
            assert details["span_tokens_missed"] == 0
        assert shown.count(f"3 x {size}") == 3
    assert not rows
