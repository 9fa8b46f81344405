"""Settings of a running engine that benchmarks vary: starting an engine takes minutes.

`retune` runs in the worker's process, by vLLM's `collective_rpc`. That has to be the engine's, too:
the settings are the scheduler's, whose owner is then above us on the call stack. vLLM has no call
of its own that reaches it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["ALLOW", "retune"]

ALLOW = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""vLLM sends functions to an engine of its own making only where this is set."""

_taken: list[Any] = []
"""Blocks that the engine in this process has to do without."""


def retune(worker: Any, settings: Mapping[str, Any]) -> int:
    """Changes an idle engine.

    Args:
        worker: vLLM's.
        settings: `max_num_seqs`, not above what the engine started with; `policy`, of an engine
            with spans; `cache_blocks`, the blocks of its cache, None for all of them.

    Returns:
        Tokens that its cache holds now.
    """
    scheduler = _scheduler()
    if "max_num_seqs" in settings:
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = settings["max_num_seqs"]
    if "policy" in settings:
        scheduler.planner.policy = settings["policy"]
    pool = scheduler.kv_cache_manager.block_pool
    if "cache_blocks" in settings:
        pool.free_blocks(_taken)
        _taken.clear()
        if not scheduler.reset_prefix_cache():
            raise RuntimeError("the engine is not idle")
        wanted = settings["cache_blocks"]
        if wanted is not None:
            _taken.extend(pool.get_new_blocks(max(pool.get_num_free_blocks() - wanted, 0)))
    return int(pool.get_num_free_blocks() * scheduler.block_size)


def _scheduler() -> Any:
    for frame in inspect.stack():
        owner: Any = frame.frame.f_locals.get("self")
        if hasattr(owner, "scheduler") and hasattr(owner, "model_executor"):
            return owner.scheduler
    raise RuntimeError("retune was not called by vLLM's EngineCore")
