"""Many coroutines on one event loop leave it time for others."""

from __future__ import annotations

import asyncio
import time

from minipic_backend.engines.turns import BUDGET_S, take_turn

WORK_S = 0.002


async def rounds_of(count: int) -> tuple[list[int], list[int]]:
    """In which round of the loop each of `count` workers worked, and in which order."""
    loop = asyncio.get_running_loop()
    now, done = 0, False
    order: list[int] = []
    rounds: list[int] = []

    def next_round() -> None:
        nonlocal now
        now += 1
        if not done:
            loop.call_soon(next_round)

    async def work(number: int) -> None:
        await take_turn()
        rounds.append(now)
        order.append(number)
        time.sleep(WORK_S)

    loop.call_soon(next_round)
    await asyncio.gather(*map(work, range(count)))
    done = True
    return rounds, order


def test_work_is_spread_over_rounds_in_order() -> None:
    rounds, order = asyncio.run(rounds_of(60))
    assert order == list(range(60))
    # One piece may begin just before the budget is used up, and one more is let go by then.
    most = int(BUDGET_S / WORK_S) + 2
    assert max(rounds.count(one) for one in rounds) <= most


def test_nobody_waits_where_there_is_time() -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        began = False

        def round_began() -> None:
            nonlocal began
            began = True

        loop.call_soon(round_began)
        await take_turn()
        await take_turn()
        return began

    assert not asyncio.run(main())


def test_a_cancelled_waiter_holds_nobody_up() -> None:
    async def main() -> list[str]:
        log: list[str] = []

        async def work(name: str) -> None:
            await take_turn()
            time.sleep(2 * BUDGET_S)
            log.append(name)

        first, second, third = (asyncio.ensure_future(work(name)) for name in "abc")
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        return log

    assert asyncio.run(main()) == ["a", "c"]


def test_every_loop_has_its_own_turns() -> None:
    for _ in range(3):
        rounds, _ = asyncio.run(rounds_of(5))
        assert len(rounds) == 5
