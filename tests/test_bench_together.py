"""`minipic bench … --together`: turns, ratios within a round, and engines that are closed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver

pytest.importorskip("vllm")

from minipic_backend.bench import command
from minipic_backend.bench.engines import MARKERS, Served
from minipic_backend.bench.measure import Row, measure_decode, measure_throughput, measure_ttft
from minipic_backend.bench.options import decode_cases
from minipic_backend.bench.report import format_table
from minipic_backend.cli import main
from minipic_backend.errors import EngineError, EngineStartError

KINDS = ["cold, no spans", *["exact prefix, no spans"] * 3, "cold spans", *["warm spans"] * 3]


class FakeSession:
    """Takes the time that a script says, in each round by kind of prompt.

    Args:
        variant: its name.
        log: where it notes (variant, kind) of each prompt.
        times: milliseconds of each kind, round by round, the first one included that warms up.
    """

    block_size = 16

    def __init__(
        self,
        variant: str,
        log: list[tuple[str, str]],
        times: Sequence[Mapping[str, float | Sequence[float]]],
        *,
        has_spans: bool,
    ) -> None:
        self.variant, self.has_spans = variant, has_spans
        self._log, self._times = log, times
        self._round, self._served = -1, 0

    def reset_cache(self) -> None:
        self._round += 1
        self._served = 0

    def serve(self, prompts: list[list[int]]) -> list[Served]:
        (prompt,) = prompts
        kind = KINDS[self._served]
        assert (MARKERS["pdep"] in prompt) == (kind in ("cold spans", "warm spans"))
        self._log.append((self.variant, kind))
        time = self._times[self._round].get(kind, 1000.0)
        if not isinstance(time, float):
            time = time[self._served - KINDS.index(kind)]
        self._served += 1
        return [Served(7.0, [7.0 + time / 1000], self._served)]


def taking(*times: float | Sequence[float], kind: str) -> list[dict[str, float | Sequence[float]]]:
    """Rounds, the first one aside."""
    return [{}, *({kind: time} for time in times)]


def test_engines_take_turns_round_by_round_in_turned_order() -> None:
    log: list[tuple[str, str]] = []
    sessions = [
        FakeSession(name, log, [{}] * 4, has_spans=name != "stock")
        for name in ("stock", "span_local", "unrotated")
    ]
    rows = list(measure_ttft(*sessions, documents=2, document_tokens=20, runs=3))  # type: ignore[arg-type]
    forth = [("stock", kind) for kind in KINDS[:4]]
    forth += [(name, kind) for name in ("span_local", "unrotated") for kind in KINDS]
    back = [(name, kind) for name in ("unrotated", "span_local") for kind in KINDS]
    back += [("stock", kind) for kind in KINDS[:4]]
    assert log == [*forth, *back, *forth, *back]
    assert [(row.variant, len(row.values)) for row in rows] == [
        *[("stock", 3), ("stock", 9)],
        *[("span_local", 3), ("span_local", 9)] * 2,
        *[("unrotated", 3), ("unrotated", 9)] * 2,
    ]


def test_taking_turns_changes_no_prompt() -> None:
    served: list[list[list[int]]] = [[], []]
    for count, prompts in zip((1, 2), served, strict=True):
        sessions = [FakeSession("span_local", [], [{}] * 3, has_spans=True) for _ in range(count)]
        serve: Callable[..., list[Served]] = sessions[-1].serve
        sessions[-1].serve = lambda given, to=prompts, by=serve: (to.extend(given), by(given))[1]  # type: ignore[method-assign]
        list(measure_ttft(*sessions, documents=2, document_tokens=20, runs=2))  # type: ignore[arg-type]
    assert len(served[0]) == 24
    assert served[0] == served[1]


def test_ratios_are_of_medians_within_a_round() -> None:
    exact, warm = "exact prefix, no spans", "warm spans"
    stock = FakeSession(
        "stock", [], taking((9.0, 90.0, 10.0), 20.0, 40.0, kind=exact), has_spans=False
    )
    spans = FakeSession(
        "span_local", [], taking(20.0, (1.0, 10.0, 11.0), 60.0, kind=warm), has_spans=True
    )
    rows = list(measure_ttft(stock, spans, documents=2, document_tokens=20, runs=3))  # type: ignore[arg-type]
    found = {(row.variant, row.case.split(": ")[1]): row for row in rows}
    for pair in ("span_local", warm), ("stock", exact):
        assert found[pair].median == pytest.approx(20)
    details = found["span_local", warm].details
    assert details["paired_with"] == exact
    assert details["paired_ratios"] == pytest.approx([2, 0.5, 1.5])
    assert details["paired_ratio"] == pytest.approx(1.5)  # not 20 / 20
    same = found["span_local", exact].details
    assert same["paired_with"] == exact
    assert same["paired_ratios"] == pytest.approx([100, 50, 25])
    assert found["span_local", "cold, no spans"].details["paired_ratio"] == pytest.approx(1)
    for variant, case in [("span_local", "cold spans"), ("stock", exact), ("stock", KINDS[0])]:
        assert not {key for key in found[variant, case].details if "paired" in key}
    lines = format_table(rows, "stock").splitlines()
    assert lines[0].endswith("paired / stock")
    assert lines[-1].split(" ms ")[1].strip() == "1.500 of exact prefix, no spans"
    assert lines[4].split(" ms ")[1].split() == ["50.000", "50.000"]


def test_a_case_that_both_have_is_paired_with_itself() -> None:
    sessions = [
        FakeSession(name, [], taking(time, kind="warm spans"), has_spans=True)
        for name, time in (("span_local", 10.0), ("unrotated", 15.0))
    ]
    *_, row = measure_ttft(*sessions, documents=2, document_tokens=20, runs=1)  # type: ignore[arg-type]
    assert row.details["paired_with"] == "warm spans"
    assert row.details["paired_ratio"] == pytest.approx(1.5)
    (line,) = format_table([row], "span_local").splitlines()[1:]
    assert line.endswith(" 1.500")


def test_one_engine_alone_has_no_pairs() -> None:
    session = FakeSession("span_local", [], [{}] * 2, has_spans=True)
    rows: list[Row] = list(measure_ttft(session, documents=2, document_tokens=20, runs=1))  # type: ignore[arg-type]
    assert all(set(row.details) == {"tokens", "cached"} for row in rows)
    assert "paired" not in format_table(rows, "stock")


class SteadySession:
    """Decodes and prefills at the speed of each round, the first one included that warms up.

    Args:
        variant: its name.
        log: where it notes itself, once for each batch.
        clock: that it moves on; seconds, in a list of one.
        speeds: of each round: milliseconds of a token, whatever the batch.
    """

    block_size = 16

    def __init__(
        self, variant: str, log: list[str], clock: list[float], speeds: Sequence[float]
    ) -> None:
        self.variant, self.has_spans = variant, variant != "stock"
        self._log, self._clock, self._speeds = log, clock, list(speeds)
        self.batches: list[list[list[int]]] = []

    def reset_cache(self) -> None:
        assert not self.batches

    def serve(self, prompts: list[list[int]], *, max_tokens: int = 1) -> list[Served]:
        self._log.append(self.variant)
        self.batches.append(prompts)
        step = self._speeds.pop(0) / 1000
        begin = self._clock[0]
        times = [begin + step * (1 + token) for token in range(max_tokens)]
        self._clock[0] = times[-1]
        return [Served(begin, times, 0) for _ in prompts]


@pytest.mark.parametrize("bench", ["decode", "throughput"])
def test_other_benches_take_turns_too(bench: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    clock = [100.0]
    monkeypatch.setattr("minipic_backend.bench.measure.time.perf_counter", lambda: clock[0])
    stock = SteadySession("stock", log, clock, [9, 10, 20, 40])
    spans = SteadySession("span_local", log, clock, [9, 20, 10, 60])
    if bench == "decode":
        made = measure_decode(stock, spans, batch=2, context=200, documents=2, steps=4, runs=3)  # type: ignore[arg-type]
        milliseconds = [[10, 20, 40], [20, 10, 60]]
        ratios = [2, 0.5, 1.5]
    else:
        made = measure_throughput(stock, spans, samples=5, runs=3)  # type: ignore[arg-type]
        milliseconds = [[500, 250, 125], [250, 500, 5000 / 60]]  # samples a second
        ratios = [0.5, 2, 1 / 1.5]
    first, second = made
    assert log == ["stock", "span_local", "span_local", "stock"] * 2
    assert [first.variant, second.variant] == ["stock", "span_local"]
    assert [list(row.values) for row in (first, second)] == [
        pytest.approx(values) for values in milliseconds
    ]
    assert "paired_ratio" not in first.details
    assert second.details["paired_ratios"] == pytest.approx(ratios)
    assert second.details["paired_ratio"] == pytest.approx(sorted(ratios)[1])
    (line,) = format_table([second], "stock").splitlines()[1:]
    assert line.endswith(f" {sorted(ratios)[1]:.3f}")
    marked = [[MARKERS["ssep"] in prompt for prompt in one.batches[-1]] for one in (stock, spans)]
    assert marked == [[False] * len(stock.batches[-1]), [bench == "decode"] * len(spans.batches[0])]
    again = stock.batches[1] == stock.batches[0]
    assert again == (bench == "decode")  # decode goes on behind cached prompts, prefill must not
    assert stock.batches[0] == spans.batches[0] or bench == "decode"


class WavesSession(SteadySession):
    """Has room for a few requests at once: the others wait for them."""

    room = 3

    def serve(self, prompts: list[list[int]], *, max_tokens: int = 1) -> list[Served]:
        waves = [prompts[i : i + self.room] for i in range(0, len(prompts), self.room)]
        self._speeds = [self._speeds[0]] * len(waves) + self._speeds[1:]
        return [
            one
            for wave in waves
            for one in super(WavesSession, self).serve(wave, max_tokens=max_tokens)
        ]


@pytest.mark.parametrize("batch", [1, 3, 4, 7])
def test_a_batch_that_does_not_decode_at_once_is_told(batch: int) -> None:
    """With several engines at once, each has a part of the memory."""
    made = measure_decode(
        SteadySession("stock", [], [0.0], [9, 10]),  # type: ignore[arg-type]
        WavesSession("span_local", [], [0.0], [9, 20]),  # type: ignore[arg-type]
        batch=batch,
        context=200,
        steps=4,
        runs=1,
    )
    if batch <= WavesSession.room:
        assert [row.median for row in made] == pytest.approx([10, 20])
    else:
        with pytest.raises(EngineError, match=rf"{batch} x 200, no spans: span_local does not"):
            list(made)


@pytest.mark.parametrize("documents", [1, 2, 7])
def test_the_least_context_of_documents_is_measured(documents: int) -> None:
    (case,) = decode_cases(f"1x{64 + 50 + documents}:{documents}")
    session = SteadySession("span_local", [], [0.0], [9, 10])
    (row,) = measure_decode(
        session,  # type: ignore[arg-type]
        batch=case[0],
        context=case[1],
        documents=case[2],
        steps=4,
        runs=1,
    )
    assert session.batches[0][0].count(MARKERS["ssep"]) == documents
    assert row.details["tokens"] == [len(session.batches[0][0])]


def test_details_count_the_tokens_of_each_kind_of_prompt() -> None:
    session = FakeSession("span_local", [], [{}] * 2, has_spans=True)
    given: dict[str, int] = {}
    serve = session.serve

    def noting(prompts: list[list[int]]) -> list[Served]:
        given[KINDS[session._served]] = len(prompts[0])
        return serve(prompts)

    session.serve = noting  # type: ignore[method-assign]
    rows = measure_ttft(session, documents=3, document_tokens=20, runs=1)  # type: ignore[arg-type]
    found = {row.case.split(": ")[1]: row.details["tokens"] for row in rows}
    assert found == given
    assert found["warm spans"] - found["exact prefix, no spans"] == 3 * 12  # pads


@pytest.mark.parametrize(
    ("given", "on_gpu", "share"),
    [
        ("--compare stock", True, 0.92 / 2),
        ("--compare stock --engine span_local,unrotated --gpu-memory-utilization 0.9", True, 0.3),
        ("--compare stock --gpu-memory-utilization 0.9", False, 0.9),
        ("--compare stock", False, None),
    ],
)
def test_engines_share_out_the_memory_of_a_gpu(
    given: str, on_gpu: bool, share: float | None
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(["ttft", "--together", *given.split()])
    found = command._engine_args(options, on_gpu=on_gpu).get("gpu_memory_utilization")
    assert found == (share if share is None else pytest.approx(share))


class Engines:
    """Stands in for the drivers of engines; one of them can fail.

    Args:
        outcome: of starting the second one, or of its last prompt.
        starts: False: it does not start.
    """

    def __init__(self, outcome: BaseException, *, starts: bool) -> None:
        self.outcome, self.starts = outcome, starts
        self.made: list[FakeDriver] = []

    def __call__(self, arguments: Mapping[str, Any], *, separate_process: bool) -> FakeDriver:
        assert separate_process
        driver = FakeDriver()
        if self.made:
            if not self.starts:
                raise self.outcome
            driver.submit = self._failing(driver.submit)  # type: ignore[method-assign]
        self.made.append(driver)
        return driver

    def _failing(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def run(prompt: list[int], params: Any) -> Any:
            if self.made[1].submitted == 2 * 2 * 8 - 1:  # documents, rounds, prompts
                raise self.outcome
            return submit(prompt, params)

        return run


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(
    ("outcome", "status", "told"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (EngineStartError("too little memory"), 2, "too little memory"),
        (EngineError("it stopped"), 2, "it stopped"),
    ],
)
def test_all_engines_are_closed_and_what_was_measured_is_kept(
    outcome: BaseException,
    status: int,
    told: str,
    starts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines = Engines(outcome, starts=starts)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr("minipic_backend.bench.engines.EngineDriver", engines)
    target = tmp_path / "figures.json"
    arguments = "ttft --together --compare stock --documents 2,3 --document-tokens 20 --runs 1"
    given = ["bench", *arguments.split(), "--model", "shape:tiny", "--json", str(target)]
    assert main(given) == status
    assert [driver.closed for driver in engines.made] == [True] * (1 + starts)
    printed = capsys.readouterr()
    *before, last = printed.err.splitlines()
    assert last.startswith("minipic bench: ")
    assert last.endswith(told)
    if isinstance(outcome, EngineStartError) and not starts:
        assert "span_local, one of 2 engines at once: " in last
    assert not any("Traceback" in line for line in before)
    if starts:
        rows = json.loads(target.read_text())["rows"]
        # The KV caches, and the first number of documents.
        assert [row["variant"] for row in rows] == [
            *["stock", "span_local"],
            *["stock"] * 2,
            *["span_local"] * 4,
        ]
        assert rows[-1]["details"]["paired_ratio"] == 1
        table = printed.out.splitlines()
        assert len(table) == 2 + len(rows)
        assert "stock" in table[2]
        assert "warm spans" in table[-1]
    else:
        assert not target.exists()
        assert not printed.out
