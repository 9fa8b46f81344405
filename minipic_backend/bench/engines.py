"""Engines under measurement, by one name each, and requests of raw token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.bench.models import model_arguments
from minipic_backend.config import CONFIG_KEY
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.errors import ConfigurationError, shown

__all__ = ["MARKERS", "VARIANTS", "Served", "Session", "open_session"]

MARKERS = {"ssep": 3, "pdep": 4, "pad": 5}
"""Token ids of markers and pad in benchmarks; random prompts avoid them."""

VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock-triton": {"attention_backend": "TRITON_ATTN"},
    "span_local": {"spans": {"key_encoding": "span_local"}},
    "unrotated": {"spans": {"key_encoding": "unrotated"}},
}
"""`stock` is vLLM as it comes; the others name what they differ in."""


@dataclass(slots=True)
class Served:
    """One finished request. Times are seconds on one clock.

    Args:
        submitted_at: when it was handed to the engine.
        token_times: when each generated token arrived.
        num_cached_tokens: prompt tokens read from the cache.
        token_ids: what was generated.
    """

    submitted_at: float
    token_times: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.submitted_at


class Session:
    """A running engine and its block size.

    Args:
        variant: its name.
        driver: of the engine.
        progress: called with the number of prompts done.
    """

    def __init__(
        self,
        variant: str,
        driver: EngineDriver,
        progress: Callable[[int], Any] = lambda count: None,
    ) -> None:
        self.variant = variant
        self._progress = progress
        self.driver = driver
        self.block_size: int = driver.llm.vllm_config.cache_config.block_size
        self.has_spans = "spans" in VARIANTS[variant]

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> list[Served]:
        """Runs prompts together, greedily, to exactly `max_tokens` tokens each.

        Args:
            prompts: token ids.
            max_tokens: of each answer.
            options: of the spans.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={CONFIG_KEY: dict(options)} if options else None,
        )
        handles = [self.driver.submit(prompt, params) for prompt in prompts]
        results = []
        for handle in handles:
            served = Served(handle.submitted_at)
            for delta in handle.deltas():
                for output in delta.outputs:
                    served.token_times += [delta.at] * len(output.token_ids)
                    served.token_ids += output.token_ids
                served.num_cached_tokens = delta.num_cached_tokens or 0
            results.append(served)
            self._progress(1)
        return results

    def retune(self, settings: Mapping[str, Any]) -> int:
        """Changes the idle engine, with an empty cache; see `retune.retune`.

        Returns:
            Tokens that the cache holds.
        """
        from minipic_backend.bench.retune import retune

        args = (dict(settings),)
        (tokens,) = self.driver.call(lambda llm: llm.collective_rpc(retune, args=args))
        return int(tokens)

    def reset_cache(self) -> None:
        """Forgets every cached block."""
        if not self.driver.call(lambda llm: llm.reset_prefix_cache()):
            raise RuntimeError("the prefix cache is in use by running requests: not reset")


@contextmanager
def open_session(
    variant: str,
    model: str,
    engine_args: Mapping[str, Any],
    *,
    separate_process: bool = True,
    progress: Callable[[int], Any] = lambda count: None,
) -> Iterator[Session]:
    """Starts an engine, in a process of its own as vLLM's `LLM` does, and closes it.

    Args:
        variant: its name.
        model: see `model_arguments`.
        engine_args: vLLM's `EngineArgs`.
        separate_process: False: the engine runs in this process.
        progress: called with the number of prompts done.

    Raises:
        ConfigurationError: an unknown variant.
    """
    if variant not in VARIANTS:
        raise ConfigurationError(f"Unknown variant {shown(variant)}; known: {', '.join(VARIANTS)}")
    from minipic_backend.plugin import register

    settings = dict(VARIANTS[variant])
    spans = settings.pop("spans", None)
    if spans is not None:
        register()
        settings["additional_config"] = {CONFIG_KEY: {**MARKERS, **spans}}
    if "attention_backend" in settings:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        settings["attention_backend"] = AttentionBackendEnum[settings["attention_backend"]]
    with model_arguments(model) as arguments:
        arguments = {**arguments, **engine_args, **settings}
        driver = EngineDriver(arguments, separate_process=separate_process)
        try:
            yield Session(variant, driver, progress)
        finally:
            driver.close()
