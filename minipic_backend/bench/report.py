"""Figures as a table, as ratios to a baseline, and as JSON with the machine they were made on."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minipic_backend import __version__
from minipic_backend.bench.measure import Row
from minipic_backend.table import format_rows

__all__ = ["environment", "format_table", "write_json"]


def environment(model: str, engine_args: dict[str, Any]) -> dict[str, Any]:
    """Device, versions and shapes: what a figure means nothing without."""
    import torch
    from vllm.version import __version__ as vllm_version

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else _cpu_name()
    return {
        "device": device,
        "model": model,
        "engine_args": engine_args,
        "minipic": __version__,
        "vllm": vllm_version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": _command(sys.argv[1:]),
    }


def format_table(rows: Sequence[Row], baseline: str | None) -> str:
    """A line per figure: median, spread, and the ratio to the same case on `baseline`."""
    base = {(row.bench, row.case): row.median for row in rows if row.variant == baseline}
    cells = [("bench", "case", "engine", "median", "min-max", "unit", f"/ {baseline or '-'}")]
    for row in rows:
        reference = base.get((row.bench, row.case))
        cells.append(
            (
                row.bench,
                row.case,
                row.variant,
                f"{row.median:.4g}",
                f"{min(row.values):.4g} - {max(row.values):.4g}",
                row.unit,
                f"{row.median / reference:.3f}" if reference else "",
            )
        )
    return "\n".join(format_rows(cells))


def write_json(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Writes everything that `format_table` tells, and every single run."""
    content = {"about": about, "rows": [row.to_dict() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _command(arguments: list[str]) -> list[str]:
    """What was asked, without where the results were to go."""
    kept = list(arguments)
    while "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    return kept


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
