"""Many clients at once, some of which leave early."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from documents import chat, passages
from process import ServerProcess

from minipic_backend import RemoteEngine

NUM_CLIENTS = 32
_FLAT = 16 * 2**20
"""Bytes that a soak may add behind another. Allocators keep some, in every process."""


@dataclass
class Tally:
    """What happened to the requests of all clients."""

    ended: Counter[str] = field(default_factory=Counter)
    answers: dict[int, set[str]] = field(default_factory=dict)


async def read(engine: RemoteEngine, topic: int, leave_after: int | None, tally: Tally) -> str:
    """Streams an answer, to its end or to a number of pieces."""
    texts: list[str] = []
    prompt = chat(list(passages()[topic : topic + 2]))
    async with aclosing(engine.astream(prompt, max_tokens=12, temperature=0.0)) as stream:
        async for chunk in stream:
            texts.append(chunk.text)
            if len(texts) == leave_after:
                return "left"
    tally.answers.setdefault(topic, set()).add("".join(texts))
    return "read"


async def client(engine: RemoteEngine, seed: int, until: float, tally: Tally) -> None:
    """Asks about a few documents; leaves, is cancelled, or reads to the end."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        fate = rng.choice(["read", "leave", "cancel"])
        leave_after = rng.randrange(1, 8) if fate == "leave" else None
        task = asyncio.create_task(read(engine, rng.randrange(12), leave_after, tally))
        if fate == "cancel":
            await asyncio.sleep(rng.uniform(0.0, 1.5))
            task.cancel()
        try:
            tally.ended[await task] += 1
        except asyncio.CancelledError:
            tally.ended["cancelled"] += 1


async def clients(engine: RemoteEngine, seconds: float) -> Tally:
    tally = Tally()
    until = time.monotonic() + seconds
    # Any error but a cancel ends the test here.
    await asyncio.gather(*(client(engine, seed, until, tally) for seed in range(NUM_CLIENTS)))
    return tally


def test_streaming_clients_with_random_cancels(
    server: ServerProcess, remote: RemoteEngine, request: pytest.FixtureRequest
) -> None:
    """Memory is flat: of two soaks of the same length, the second adds next to nothing."""
    seconds = request.config.getoption("--soak-s")
    asyncio.run(clients(remote, seconds))
    server.wait_until_idle()
    before = server.resident_bytes()
    tally = asyncio.run(clients(remote, seconds))
    server.wait_until_idle()
    after = server.resident_bytes()
    print(f"{dict(tally.ended)}, {before / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after")
    assert min(tally.ended[how] for how in ("read", "left", "cancelled")) > 0
    assert not remote._transport._tasks
    assert sum(map(len, tally.answers.values())) >= len(tally.answers) > 0
    assert after - before < _FLAT
