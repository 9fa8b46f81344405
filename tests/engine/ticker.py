"""How long an event loop stands still, and how much of that is the machine's doing.

A second ticker runs in a process of its own, where nothing holds it up but the machine: what it
misses at the same moment is not the loop's fault.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Stalls", "watch"]

_T = TypeVar("_T")
_PERIOD_S = 0.005
_CONTROL = f"""
import sys, time
print("ready", flush=True)
before = time.monotonic()
while True:
    time.sleep({_PERIOD_S})
    now = time.monotonic()
    if now - before > 2 * {_PERIOD_S}:
        print(before, now, flush=True)
    before = now
"""


@dataclass(frozen=True)
class Stalls:
    """Intervals (start, end) on the monotonic clock, in seconds."""

    loop: list[tuple[float, float]]
    machine: list[tuple[float, float]]

    @property
    def worst_s(self) -> float:
        """The longest stall of the loop, less what the machine stood still in it."""
        return max((self._own(*stall) for stall in self.loop), default=0.0)

    def _own(self, start: float, end: float) -> float:
        shared = (min(end, stop) - max(start, begin) for begin, stop in self.machine)
        return end - start - sum(part for part in shared if part > 0)


async def watch(work: Awaitable[_T]) -> tuple[_T, Stalls]:
    """What `work` gives, and the stalls while it ran."""
    control = subprocess.Popen([sys.executable, "-c", _CONTROL], stdout=subprocess.PIPE, text=True)
    assert control.stdout is not None
    control.stdout.readline()
    task = asyncio.ensure_future(work)
    loop: list[tuple[float, float]] = []
    before = time.monotonic()
    while not task.done():
        await asyncio.sleep(_PERIOD_S)
        now = time.monotonic()
        if now - before > 2 * _PERIOD_S:
            loop.append((before, now))
        before = now
    time.sleep(4 * _PERIOD_S)  # the control notes its last stall down when that is over
    control.kill()
    lines, _ = control.communicate()
    pairs = [line.split() for line in lines.splitlines() if line.count(" ") == 1]
    return await task, Stalls(loop, [(float(start), float(end)) for start, end in pairs])
