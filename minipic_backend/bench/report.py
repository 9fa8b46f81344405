"""Figures as a table, as ratios to a baseline, as JSON with the machine they were made on, and as a
plot."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minipic_backend import __version__
from minipic_backend.bench.measure import Row
from minipic_backend.plot import draw_bars
from minipic_backend.table import format_rows

__all__ = ["environment", "format_table", "write_json", "write_plot"]

_TITLES = {
    "capacity": "KV cache",
    "ttft": "time to first token",
    "anew": "computed anew",
}
_OUTPUTS = ("--json", "--plot")


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
    """A line per figure: median, spread, and the ratio to the same case on `baseline`; where
    engines took turns, the paired ratio, too."""
    base = {(row.bench, row.case): row.median for row in rows if row.variant == baseline}
    cells = [["bench", "case", "engine", "median", "min-max", "unit", f"/ {baseline or '-'}"]]
    for row in rows:
        reference = base.get((row.bench, row.case))
        cells.append(
            [
                row.bench,
                row.case,
                row.variant,
                f"{row.median:.4g}",
                f"{min(row.values):.4g} - {max(row.values):.4g}",
                row.unit,
                f"{row.median / reference:.3f}" if reference else "",
            ]
        )
    if any("paired_ratio" in row.details for row in rows):
        pairs = [f"paired / {baseline}", *map(_paired, rows)]
        cells = [[*line, pair] for line, pair in zip(cells, pairs, strict=True)]
    return "\n".join(format_rows(cells))


def _paired(row: Row) -> str:
    if "paired_ratio" not in row.details:
        return ""
    other = row.details["paired_with"]
    of = "" if row.case == other or row.case.endswith(f": {other}") else f" of {other}"
    return f"{row.details['paired_ratio']:.3f}{of}"


def write_json(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Writes everything that `format_table` tells, and every single run."""
    content = {"about": about, "rows": [row.to_dict() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, rows: Sequence[Row], model: str, about: dict[str, Any]) -> None:
    """A panel for each bench, in it a group of bars for each case, a bar for each engine: the
    median, and the least and the greatest run as its error bar. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.bench, []).append(row)
    variants = list(dict.fromkeys(row.variant for row in rows))
    heights = [len(found) + len({row.case for row in found}) for found in panels.values()]
    height = 1 + 0.8 * len(panels) + 0.2 * sum(heights)
    figure = Figure(figsize=(9, height), layout="constrained")
    column = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (bench, found) in zip(column, panels.items(), strict=True):
        _draw_panel(axes, bench, found, variants)
    bars = {bar.get_label(): bar for axes in column for bar in axes.containers}
    bars = {variant: bars[variant] for variant in variants}
    figure.legend(bars.values(), bars, loc="outside lower center", ncols=4)
    figure.suptitle(f"{Path(model).name}, {about['device']}, vLLM {about['vllm']}", fontsize=10)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Any, bench: str, rows: Sequence[Row], variants: Sequence[str]) -> None:
    """Cases from top to bottom, engines in the same order within each."""
    from matplotlib.ticker import LogFormatter

    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    ticks: dict[str, float] = {}
    bars: dict[str, list[tuple[float, Row]]] = {}
    place = 0
    for case, found in cases.items():
        ticks[case] = place + (len(found) - 1) / 2
        for row in found:
            bars.setdefault(row.variant, []).append((place, row))
            place += 1
        place += 1  # between groups
    unit = rows[0].unit
    if bench == "ttft":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter())
        unit += ", log axis"
    for variant, placed in bars.items():
        number = variants.index(variant)
        drawn = draw_bars(
            axes,
            [place for place, _ in placed],
            [(row.median, min(row.values), max(row.values)) for _, row in placed],
            label=variant,
            color=f"C{number}",
            hatch="/" * (number // 10),  # there are ten colors
        )
        axes.bar_label(drawn, fmt="%.4g", padding=3, fontsize=7)
    axes.margins(x=0.12)
    if bench == "ttft":  # last, since it ends matplotlib's own choice of both limits
        axes.set_xlim(left=min(min(row.values) for row in rows) / 2)
    axes.set_ylim(place - 1, -1)
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=8)
    axes.set_title(_TITLES.get(bench, bench), loc="left", fontsize=10)
    axes.set_xlabel(unit)


def _command(arguments: list[str]) -> list[str]:
    """What was asked, without where the results were to go."""
    kept = []
    rest = iter(arguments)
    for argument in rest:
        name, with_value, _ = argument.partition("=")
        # argparse takes beginnings of options, too.
        if len(name) > 2 and any(option.startswith(name) for option in _OUTPUTS):
            if not with_value:
                next(rest, None)
        else:
            kept.append(argument)
    return kept


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
