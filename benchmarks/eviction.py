"""Which spans to evict: vLLM's LRU against policies that know of reuse, on a trace of passages.

    python benchmarks/eviction.py [TRACE.jsonl] [--samples 4000] [--json OUT]

A simulation of the cache alone, span by span: a request holds its spans while it runs, `RUNNING` of
them at a time; what is not held may be evicted. Prints the share of span tokens that are read from
the cache, for caches of 5 to 50 % of all passages.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from minipic_backend.bench.trace import Workload, draw_workload, random_trace, read_trace

RUNNING = 16
BLOCK_SIZE = 16
QUESTION_BLOCKS = 3
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)


class Lru:
    """What vLLM does: blocks go in the order in which requests gave them back."""

    keeps_questions = True

    def __init__(self) -> None:
        self.order: OrderedDict[object, None] = OrderedDict()

    def free(self, name: object, uses: int) -> None:
        self.order[name] = None

    def take(self, name: object) -> None:
        self.order.pop(name, None)

    def victim(self) -> object:
        return self.order.popitem(last=False)[0]


class QuestionsFirst(Lru):
    """LRU, but for what can hardly come again: questions and answers go at once."""

    keeps_questions = False


class Segmented(QuestionsFirst):
    """Two LRU lists: what was used twice is evicted after what was used once, up to `PROTECTED`
    spans."""

    PROTECTED = 1500

    def __init__(self) -> None:
        super().__init__()
        self.protected: OrderedDict[object, None] = OrderedDict()

    def free(self, name: object, uses: int) -> None:
        if uses < 2:
            self.order[name] = None
            return
        self.protected[name] = None
        if len(self.protected) > self.PROTECTED:
            self.order[self.protected.popitem(last=False)[0]] = None

    def take(self, name: object) -> None:
        self.order.pop(name, None)
        self.protected.pop(name, None)

    def victim(self) -> object:
        return (self.order or self.protected).popitem(last=False)[0]


class Frequency(QuestionsFirst):
    """Least frequently used, aged: a span's rank is its uses so far plus the rank of the last
    victim when it was last used (LFU with dynamic aging)."""

    def __init__(self) -> None:
        super().__init__()
        self.age = 0.0
        self.heap: list[tuple[float, int, object]] = []
        self.free_now: dict[object, int] = {}
        self.numbers = itertools.count()

    def free(self, name: object, uses: int) -> None:
        number = next(self.numbers)
        self.free_now[name] = number
        heapq.heappush(self.heap, (self.age + uses, number, name))

    def take(self, name: object) -> None:
        self.free_now.pop(name, None)

    def victim(self) -> object:
        while True:
            rank, number, name = heapq.heappop(self.heap)
            if self.free_now.get(name) == number:
                del self.free_now[name]
                self.age = rank
                return name


POLICIES: dict[str, type[Lru]] = {
    "LRU (vLLM)": Lru,
    "questions first": QuestionsFirst,
    "segmented LRU": Segmented,
    "aged LFU": Frequency,
}


def hit_share(samples: Iterable[tuple[int, ...]], sizes: list[int], room: int, kind: type) -> float:
    """Share of span blocks that were cached when a sample came."""
    policy: Lru = kind()
    cached: dict[object, int] = {}
    held: Counter[object] = Counter()
    uses: Counter[object] = Counter()
    running: deque[list[object]] = deque()
    free, read, total = room, 0, 0
    for number, sample in enumerate(samples):
        names: list[object] = [*sample, ("question", number)]
        if len(running) == RUNNING:
            for name in reversed(running.popleft()):
                held[name] -= 1
                if not held[name]:
                    if isinstance(name, tuple) and not policy.keeps_questions:
                        free += cached.pop(name)
                    else:
                        policy.free(name, uses[name])
        for name in names:
            size = QUESTION_BLOCKS if isinstance(name, tuple) else sizes[name]  # type: ignore[index]
            uses[name] += 1
            if not isinstance(name, tuple):
                total += size
                read += size * (name in cached)
            if name in cached:
                policy.take(name)
            else:
                while free < size:
                    free += cached.pop(policy.victim())
                cached[name] = size
                free -= size
            held[name] += 1
        running.append(names)
    return read / total


def skewed(workload: Workload, seed: int = 0) -> list[tuple[int, ...]]:
    """As many samples, whose passages are drawn by popularity (Zipf, exponent 0.8)."""
    rng = np.random.default_rng(seed)
    count = len(workload.trace.passages)
    weights = 1 / np.arange(1, count + 1) ** 0.8
    weights = rng.permutation(weights / weights.sum())
    return [tuple(rng.choice(count, 10, False, weights).tolist()) for _ in workload.samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace = read_trace(options.trace) if options.trace else random_trace(6119)
    workload = draw_workload(trace, options.samples, None)
    sizes = [-(-(len(passage) + 1) // BLOCK_SIZE) for passage in trace.passages]
    whole = sum(sizes)
    figures = {}
    for name, samples in (("the trace", workload.samples), ("by popularity", skewed(workload))):
        print(f"{name}: {len(workload.samples)} samples, {trace.name}, cache of")
        print(f"{'':18}" + "".join(f"{share:>8.0%}" for share in SHARES))
        for policy, kind in POLICIES.items():
            shares = [hit_share(samples, sizes, round(whole * part), kind) for part in SHARES]
            figures[f"{name}, {policy}"] = shares
            print(f"{policy:18}" + "".join(f"{share:>8.1%}" for share in shares))
    if options.json:
        content = {"shares": SHARES, "samples": options.samples, "figures": figures}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
