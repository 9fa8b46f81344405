"""Lets many coroutines share an event loop fairly.

A loop runs everything that is ready before it looks at timers and sockets again. 200 calls that
start together, or that end with the same step of an engine, each with a millisecond of Python to
run, hold up everybody else for 0.2 s. So each waits for its turn in front of such work: in a round
of the loop they go on until `BUDGET_S` has gone by; those that come later queue up, and one of them
goes in each round after, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

__all__ = ["BUDGET_S", "take_turn"]

BUDGET_S = 0.005
"""Seconds of one round of the loop that may go by before newcomers wait for a later one."""


async def take_turn() -> None:
    """Waits until this round of the loop has time for a piece of work."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = _Turns(loop)
    await turns.take()


class _Turns:
    """Of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._round_began: float | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        if self._round_began is None:
            self._round_began = self._loop.time()
            self._loop.call_soon(self._next_round)
        elif self._waiting or self._loop.time() - self._round_began > BUDGET_S:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            await turn

    def _next_round(self) -> None:
        """Runs once a round while anybody waits; who is let go runs in the round after."""
        self._round_began = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its task was cancelled
                turn.set_result(None)
                self._round_began = self._loop.time()
                self._loop.call_soon(self._next_round)
                return


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
