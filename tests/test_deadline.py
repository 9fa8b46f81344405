"""Requests that may take so long and no longer."""

from __future__ import annotations

import time

import pytest

from minipic_backend.engines.deadline import deadline
from minipic_backend.errors import RequestAbortedError
from minipic_backend.testing import FakeEngine


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_it_holds_however_late_the_request_begins(late_s: float) -> None:
    """The time may be over while a prompt is still being laid out."""
    engine = FakeEngine(ttft_s=60.0)
    started = time.monotonic()

    def answer() -> None:
        with deadline(engine, {"request_id": "mine"}, 0.1) as options:
            time.sleep(late_s)
            engine.generate("x", **options)

    with pytest.raises(TimeoutError, match=r"timeout=0\.1 s"):
        answer()
    assert time.monotonic() - started < 30
    assert engine.aborted == ["mine"]


def test_what_ends_in_time_is_left_alone() -> None:
    engine = FakeEngine()
    for timeout_s in (None, 0.2):
        with deadline(engine, {"request_id": "mine"}, timeout_s) as options:
            assert options == {"request_id": "mine"}
            engine.generate("x", **options)
    time.sleep(0.4)
    assert engine.aborted == []
    with pytest.raises(RequestAbortedError, match="somebody"), deadline(engine, {}, 60.0):
        raise RequestAbortedError("by somebody else")
