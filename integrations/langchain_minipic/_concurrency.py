"""How many calls run at once where LangChain would run few."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

__all__ = ["MAX_THREADS", "all_at_once"]

MAX_THREADS = 256
"""Each waits for the engine, which runs them all at once; LangChain's own default is few."""


def all_at_once(
    config: RunnableConfig | Sequence[RunnableConfig] | None, number: int
) -> list[RunnableConfig]:
    """`config` for each of `number` calls, with a thread for each unless it sets a limit."""
    configs = get_config_list(config, number)
    if not configs or configs[0].get("max_concurrency") is not None:
        return configs
    return [{**one, "max_concurrency": min(number, MAX_THREADS)} for one in configs]
