"""Drives a running engine with raw token prompts, and looks at what its scheduler did."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from minipic_backend import Engine
from minipic_backend.config import CONFIG_KEY, SpanConfig, SpanOptions
from minipic_backend.engines.driver import EngineDriver, Handle

__all__ = ["Answer", "Rig", "Steps"]

FORCED_TOKEN = 260  # " the"
SPOILED = 1e3
"""Far outside of what keys and values hold. Not NaN: vLLM's own kernel multiplies what lies behind
the last token of a block with a weight of 0."""


@dataclass(frozen=True)
class Answer:
    """What came back. `logprobs`: float64 [num_generated, vocab], over the whole vocabulary."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    logprobs: torch.Tensor

    def first(self, count: int) -> Answer:
        """Its first tokens only."""
        return Answer(self.token_ids[:count], self.cached_tokens, self.logprobs[:count])


@dataclass(frozen=True)
class Scheduled:
    """One request's share of a step."""

    start: int
    count: int
    block_ids: tuple[int, ...]
    num_preemptions: int


@dataclass
class Steps:
    """What the scheduler did, step by step: request id → its share."""

    steps: list[dict[str, Scheduled]] = field(default_factory=list)
    jobs: list[dict[str, int]] = field(default_factory=list)
    """Internal requests of each step, whether or not others were in it: id → tokens."""

    def of(self, request_id: str) -> list[Scheduled]:
        return [step[request_id] for step in self.steps if request_id in step]

    def chunks(self, request_id: str) -> list[int]:
        """Tokens of the request in each step."""
        return [share.count for share in self.of(request_id)]

    def preemptions(self, request_id: str) -> int:
        return max(share.num_preemptions for share in self.of(request_id))

    @property
    def request_ids(self) -> list[str]:
        return list(dict.fromkeys(name for step in self.steps for name in step))

    @property
    def largest_batch(self) -> int:
        return max(len(step) for step in self.steps)


class Rig:
    """An engine under test, or vLLM without spans (`engine` is None).

    Everything that touches vLLM runs on the engine's thread, between steps.
    """

    def __init__(self, driver: EngineDriver, engine: Engine | None = None) -> None:
        self.driver = driver
        config = driver.llm.vllm_config
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        if engine is not None:
            self.engine = engine
            self.config = SpanConfig.from_dict(config.additional_config[CONFIG_KEY])
            self.key_encoding = self.config.key_encoding
        self._ids = itertools.count()
        self._tapped: dict[str, list[torch.Tensor]] = {}
        self._blamed: dict[str, Any] = {}
        self.call(self._tap_logits)

    # ---- requests ---------------------------------------------------------------------------

    def params(
        self, options: SpanOptions | None = None, *, num_tokens: int = 1, **sampling: Any
    ) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = {CONFIG_KEY: options.to_dict()} if options else None
        values = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True} | sampling
        if self.dtype == "bfloat16":
            # Two tokens are often as likely as each other to rounding: let none win by chance, for
            # what comes behind could not be compared. Logits are tapped before this is applied.
            values.setdefault("allowed_token_ids", [FORCED_TOKEN])
        return SamplingParams(
            output_kind=RequestOutputKind.DELTA, detokenize=False, extra_args=extra, **values
        )

    def submit(
        self,
        token_ids: Sequence[int],
        options: SpanOptions | None = None,
        *,
        salt: str | None = None,
        request_id: str | None = None,
        **params: Any,
    ) -> Handle:
        name = request_id or f"rig-{next(self._ids)}"
        self._tapped[name] = []
        return self.driver.submit(
            token_ids, self.params(options, **params), cache_salt=salt, request_id=name
        )

    def run(
        self, token_ids: Sequence[int], options: SpanOptions | None = None, **kwargs: Any
    ) -> Answer:
        """Answers one prompt."""
        return self.read(self.submit(token_ids, options, **kwargs))

    def read(self, handle: Handle) -> Answer:
        tokens: list[int] = []
        cached = None
        try:
            for delta in handle.deltas():
                tokens += delta.outputs[0].token_ids
                cached = delta.num_cached_tokens
        finally:
            rows = self._tapped.pop(handle.request_id)
        assert cached is not None
        assert len(rows) == len(tokens)
        return Answer(tuple(tokens), cached, torch.stack(rows).double().log_softmax(-1))

    def _tap_logits(self) -> None:
        """Copies the logits of every sampled token on their way to vLLM's sampler."""
        runner = self.runner

        def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
            names = {engine: ours for ours, engine in self.driver._engine_ids.items()}
            discarded = runner.discard_request_mask.np
            for index, request_id in enumerate(runner.input_batch.req_ids):
                rows = self._tapped.get(names.get(request_id, ""))
                if rows is not None and not discarded[index]:
                    rows.append(logits[index].float().clone())
            return type(runner)._sample(runner, logits, spec_decode_metadata)

        runner._sample = sample

    # ---- the engine's inside ----------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.driver.call(lambda llm: function(*args))

    @cached_property
    def scheduler(self) -> Any:
        return self.driver.llm.engine_core.engine_core.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @cached_property
    def runner(self) -> Any:
        executor = self.driver.llm.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner

    def reset(self) -> None:
        """An empty cache, and numbers in its memory that would show if anybody read them."""
        assert self.driver.call(lambda llm: llm.reset_prefix_cache())
        self.call(lambda: [layer.fill_(SPOILED) for layer in self.runner.kv_caches])

    def assert_idle(self, timeout: float = 5.0) -> None:
        """No request is left, nor a block in use, nor anything remembered about a request."""
        deadline = time.monotonic() + timeout
        while (left := self.call(self._left_over)) != self._blamed and time.monotonic() < deadline:
            time.sleep(0.01)
        blamed, self._blamed = self._blamed, left  # on one test only
        assert left == blamed

    def _left_over(self) -> dict[str, Any]:
        scheduler = self.scheduler
        found = {
            "handles": list(self.driver._handles),
            "engine ids": list(self.driver._engine_ids),
            "requests": list(scheduler.requests),
            "outputs": list(self.driver.llm.output_processor.request_states),
            "blocks": self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks(),
            "in use": [b.block_id for b in self.pool.blocks[1:] if b.ref_cnt],
        }
        return {name: value for name, value in found.items() if value}

    def num_free_blocks(self) -> int:
        return int(self.call(lambda: self.pool.get_num_free_blocks()))

    def block_hashes(
        self, token_ids: Sequence[int], options: SpanOptions | None = None, salt: str | None = None
    ) -> list[bytes]:
        """Hashes that the running engine gives to a prompt's blocks."""
        return list(self.request(token_ids, options, salt).block_hashes)

    def request(
        self,
        token_ids: Sequence[int],
        options: SpanOptions | None = None,
        salt: str | None = None,
        hasher: Any = None,
    ) -> Any:
        """A vLLM request as the engine would make it, when its turn comes; never scheduled."""
        from vllm.v1.request import Request

        span_hasher = getattr(self.scheduler, "span_hasher", None)
        request = Request(
            request_id="probe",
            prompt_token_ids=list(token_ids),
            sampling_params=self.params(options),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=hasher or span_hasher or self.stock_hasher,
        )
        if span_hasher is not None and hasher is None:
            span_hasher.read(request)
            request.update_block_hashes()
        return request

    @property
    def stock_hasher(self) -> Any:
        """vLLM's own, with this engine's hash function."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        config = self.driver.llm.vllm_config.cache_config
        return get_request_block_hasher(
            config.block_size, get_hash_fn_by_name(config.prefix_caching_hash_algo)
        )

    def stock_hashes(self, token_ids: Sequence[int], salt: str | None = None) -> list[bytes]:
        """Hashes that vLLM's own hasher gives to the blocks of a prompt."""
        return list(self.request(token_ids, salt=salt, hasher=self.stock_hasher).block_hashes)

    def cached_blocks(
        self, token_ids: Sequence[int], options: SpanOptions | None = None, salt: str | None = None
    ) -> list[int | None]:
        """Physical block of each full block of a prompt; None where it is not cached."""

        def find() -> list[int | None]:
            found = []
            for block_hash in self.block_hashes(token_ids, options, salt):
                blocks = self.pool.get_cached_block(block_hash, [0])
                found.append(blocks[0].block_id if blocks else None)
            return found

        return self.call(find)  # type: ignore[no-any-return]

    def evict(self, block_ids: Sequence[int]) -> None:
        """Takes blocks out of the cache, and spoils what they hold."""

        def do() -> None:
            assert all(self.pool.blocks[i].block_hash is not None for i in block_ids)
            assert all(self.pool.blocks[i].ref_cnt == 0 for i in block_ids)
            self.pool.evict_blocks(set(block_ids))
            for layer in self.runner.kv_caches:
                layer[list(block_ids)] = SPOILED

        self.call(do)

    def block_content(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Keys and values of blocks in every layer: [num_layers, num_blocks, …]."""

        def read() -> torch.Tensor:
            return torch.stack([layer[list(block_ids)].clone() for layer in self.runner.kv_caches])

        return self.call(read)  # type: ignore[no-any-return]

    # ---- situations -------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine waits: requests submitted inside start together, in order."""
        entered, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            go_on.wait()

        thread = threading.Thread(target=self.call, args=(hold,))
        thread.start()
        entered.wait()
        try:
            yield
        finally:
            go_on.set()
            thread.join()

    @contextmanager
    def chunked(self, num_tokens: int) -> Iterator[None]:
        """No step computes more than `num_tokens` tokens."""
        usual = self.scheduler.max_num_scheduled_tokens
        self.call(setattr, self.scheduler, "max_num_scheduled_tokens", num_tokens)
        try:
            yield
        finally:
            self.call(setattr, self.scheduler, "max_num_scheduled_tokens", usual)

    @contextmanager
    def shrunk(self, num_blocks: int) -> Iterator[None]:
        """The cache has `num_blocks` blocks; the rest is forgotten and held by nobody's request."""
        taken = self.call(
            lambda: self.pool.get_new_blocks(self.pool.get_num_free_blocks() - num_blocks)
        )
        try:
            yield
        finally:
            self.call(self.pool.free_blocks, taken)

    @contextmanager
    def watched(self) -> Iterator[Steps]:
        """Records what the scheduler does."""
        seen = Steps()
        scheduler = self.scheduler

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = type(scheduler).schedule(scheduler, *args, **kwargs)
            names = {engine: ours for ours, engine in self.driver._engine_ids.items()}
            step = {}
            jobs = {}
            for name, count in output.num_scheduled_tokens.items():
                if name not in names:
                    jobs[name] = count
                    continue
                request = scheduler.requests[name]
                (block_ids,) = scheduler.kv_cache_manager.get_block_ids(name)
                step[names[name]] = Scheduled(
                    request.num_computed_tokens - count,
                    count,
                    tuple(block_ids),
                    request.num_preemptions,
                )
            if step:
                seen.steps.append(step)
            if jobs or step:
                seen.jobs.append(jobs)
            return output

        with ExitStack() as stack:
            self.call(setattr, scheduler, "schedule", schedule)
            stack.callback(self.call, delattr, scheduler, "schedule")
            yield seen
