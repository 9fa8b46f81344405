"""The plot and the progress bar of the benches, without an engine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver
from tqdm import tqdm

pytest.importorskip("vllm")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from minipic_backend.bench import command
from minipic_backend.bench.engines import Session
from minipic_backend.bench.measure import Row
from minipic_backend.bench.progress import progress_bar, say
from minipic_backend.bench.report import environment, write_plot
from minipic_backend.cli import main

ROWS = [
    Row("capacity", "KV cache", "stock", "tokens", (1000.0,)),
    Row("ttft", "4 x 10: cold", "stock", "ms", (500.0, 400.0, 700.0)),
    Row("ttft", "9 x 10: cold", "stock", "ms", (900.0, 800.0, 950.0)),
    Row("capacity", "KV cache", "span_local", "tokens", (990.0,)),
    Row("ttft", "4 x 10: cold", "span_local", "ms", (510.0, 505.0, 600.0)),
    Row("ttft", "4 x 10: warm", "span_local", "ms", (17.0, 16.0, 21.0)),
    Row("decode", "1 x 10", "span_local", "ms/step", (5.0, 5.5)),
]
ABOUT = {"device": "a device", "vllm": "0.32.0"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that were saved."""
    saved: list[Any] = []
    save = Figure.savefig

    def savefig(self: Any, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        saved.append(self)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def containers(axes: Any) -> dict[str, Any]:
    """matplotlib's container of each engine's bars."""
    return {one.get_label(): one for one in axes.containers if hasattr(one, "patches")}


def bars(axes: Any) -> dict[str, list[tuple[float, float, float]]]:
    """(length, low, high) of each engine's bars."""
    found = {}
    for label, container in containers(axes).items():
        (lines,) = container.errorbar.lines[2]
        spreads = [(start[0], end[0]) for start, end in lines.get_segments()]
        lengths = [bar.get_width() for bar in container.patches]
        found[label] = [(length, *spread) for length, spread in zip(lengths, spreads, strict=True)]
    return found


def test_each_figure_is_a_bar_in_the_panel_of_its_bench(tmp_path: Path, figures: list[Any]) -> None:
    path = tmp_path / "x.png"
    write_plot(path, ROWS, "folder/model", ABOUT)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert figure.get_suptitle() == "model, a device, vLLM 0.32.0"
    capacity, ttft, decode = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens", "ms, log axis", "ms/step"]
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log", "linear"]
    assert bars(capacity) == {"stock": [(1000, 1000, 1000)], "span_local": [(990, 990, 990)]}
    assert bars(decode) == {"span_local": [(5.25, 5, 5.5)]}
    assert bars(ttft) == {
        "stock": [(500, 400, 700), (900, 800, 950)],
        "span_local": [(510, 505, 600), (17, 16, 21)],
    }
    for axes in figure.axes:  # all of it is to be seen
        left, right = axes.get_xlim()
        assert all(
            left < low and high < right for one in bars(axes).values() for _, low, high in one
        )
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["stock", "span_local"]


def test_engines_stand_side_by_side_at_their_case(tmp_path: Path, figures: list[Any]) -> None:
    write_plot(tmp_path / "x.png", ROWS, "model", ABOUT)
    ttft = figures[0].axes[1]
    middles = {
        label: [bar.get_y() + bar.get_height() / 2 for bar in container.patches]
        for label, container in containers(ttft).items()
    }
    assert middles["stock"] == pytest.approx([0, 3])
    assert middles["span_local"] == pytest.approx([1, 5])
    assert list(ttft.get_yticks()) == pytest.approx([0.5, 3, 5])
    labels = [label.get_text() for label in ttft.get_yticklabels()]
    assert labels == ["4 x 10: cold", "9 x 10: cold", "4 x 10: warm"]
    bottom, top = ttft.get_ylim()
    assert bottom > 5 > 0 > top  # the first case is the uppermost


def test_an_engine_looks_the_same_in_all_panels_and_unlike_the_others(
    tmp_path: Path, figures: list[Any]
) -> None:
    names = [f"technique {number}" for number in range(12)]
    rows = [Row("ttft", "x", name, "ms", (1.0,)) for name in names]
    rows += [Row("throughput", "x", name, "prompts/s", (1.0,)) for name in reversed(names)]
    write_plot(tmp_path / "x.png", rows, "model", ABOUT)
    looks: dict[str, set[Any]] = {}
    for axes in figures[0].axes:
        for label, container in containers(axes).items():
            (bar,) = container.patches
            looks.setdefault(label, set()).add((bar.get_facecolor(), bar.get_hatch()))
    assert sorted(looks) == sorted(names)
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(names)


BENCHES = ["ttft", "cost", "quality"]


@pytest.mark.parametrize("bench", BENCHES)
@pytest.mark.parametrize(
    ("option", "name", "told"),
    [
        ("--plot", "none/x.png", "no folder"),
        ("--plot", "", "a folder, not a file"),
        ("--plot", "x.table", "not a name of a plot"),
        ("--plot", "x", "not a name of a plot"),
        ("--json", "none/x.json", "no folder"),
        ("--json", "", "a folder, not a file"),
    ],
)
def test_what_cannot_be_written_is_told_before_an_engine_starts(
    bench: str,
    option: str,
    name: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", bench, option, str(tmp_path / name)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in last
    assert told in last


@pytest.mark.parametrize("bench", BENCHES)
def test_without_matplotlib_a_plot_is_refused(
    bench: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", bench, "--plot", str(tmp_path / "x.png")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("pip install 'minipic[plot]'")


@pytest.mark.parametrize("given", ["--json /a/b --plot /a/c", "--json=/a/b --plot=/a/c", "--pl /a"])
def test_where_results_go_is_not_told_in_them(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minipic", "bench", *given.split(), "--model", "m"])
    assert environment("m", {})["command"] == ["bench", "--model", "m"]


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_is_for_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar(3) as bar:
        bar.update(2)
        say("a line")
    shown = screen.getvalue()
    assert "a line\n" in shown
    assert ("2/3" in shown) == is_terminal
    assert (shown == "a line\n") == (not is_terminal)


@pytest.mark.parametrize(
    ("benches", "panels"),
    [
        ("throughput", 2),
        ("ttft", 2),
        ("decode", 2),
        ("ttft --together --compare stock --engine span_local,unrotated --documents 3,4", 2),
        ("throughput ttft decode --compare stock --runs 2", 4),
        ("decode ttft --engine span_local,unrotated --documents 3 --decode 3x200:2,1x9", 3),
        ("throughput --trace random --samples 11,12 --compare stock --cache-share all,0.5", 2),
    ],
)
def test_the_bar_ends_when_all_is_measured_and_all_of_it_is_plotted(
    benches: str,
    panels: int,
    tmp_path: Path,
    figures: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    totals: list[tuple[int, int]] = []
    made: list[Any] = []
    drivers: list[FakeDriver] = []

    def bar(total: int) -> Any:
        made.append(tqdm(total=total, file=io.StringIO()))
        totals.append((total, len(drivers)))
        return made[-1]

    @contextmanager
    def session(variant: str, *args: Any, progress: Any, **kwargs: Any) -> Iterator[Session]:
        drivers.append(FakeDriver())
        yield Session(variant, drivers[-1], progress)  # type: ignore[arg-type]

    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "0")  # what the command makes of it goes at the end
    monkeypatch.setattr(command, "progress_bar", bar)
    monkeypatch.setattr(command, "open_session", session)
    target = tmp_path / "x.json"
    arguments = ["bench", *benches.split(), "--model", "shape:tiny", "--json", str(target)]
    assert main([*arguments, "--plot", str(tmp_path / "x.png")]) == 0

    ((total, started),) = totals
    assert started == 0  # known before an engine starts
    assert all(driver.submitted for driver in drivers)
    assert made[0].n == total == len(drivers) + sum(driver.submitted for driver in drivers)
    rows = json.loads(target.read_text())["rows"]
    (figure,) = figures
    assert len(figure.axes) == panels == len({row["bench"] for row in rows})
    assert sum(len(axes.patches) for axes in figure.axes) == len(rows)
