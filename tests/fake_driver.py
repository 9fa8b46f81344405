"""An engine's driver for the benches' tests: no engine behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["FakeDriver"]


class FakeDriver:
    """Answers in no time; counts what it was asked."""

    def __init__(self) -> None:
        self.submitted = 0
        self.closed = False
        cache = SimpleNamespace(block_size=16, num_gpu_blocks=100)
        self.llm = SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=cache),
            collective_rpc=lambda function, args: [1000],
            reset_prefix_cache=lambda: True,
        )

    def call(self, function: Any) -> Any:
        return function(self.llm)

    def submit(self, prompt: list[int], params: Any) -> Any:
        assert not self.closed
        self.submitted += 1
        token = SimpleNamespace(token_ids=[7])
        deltas = [
            SimpleNamespace(outputs=[token], at=1.0 + number, num_cached_tokens=0)
            for number in range(params.max_tokens)
        ]
        return SimpleNamespace(submitted_at=0.0, deltas=lambda: deltas)

    def close(self) -> None:
        self.closed = True
