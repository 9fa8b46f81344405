"""The scheduler with a worker made of books: no model, thousands of steps a second.

The worker keeps what vLLM's does (block tables, from scheduler outputs alone) and notes for every
physical block what it holds. Whatever a request reads from the cache is held against what its
hashes say should be there, so that an eviction, a too early read or a mixed-up job would show.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from minipic_backend.bench.models import SHAPES
from minipic_backend.config import CONFIG_KEY, SpanConfig, SpanOptions
from minipic_backend.plugin.hasher import worker_segments

__all__ = ["BLOCK_SIZE", "Served", "StepRig", "dependent", "prefix", "prompt", "span"]

BLOCK_SIZE = 16
SSEP, PDEP, PAD = 3, 4, 5


def _vllm_config(folder: Path, policy: str, hold_share: float, **settings: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from minipic_backend.plugin import register

    register()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"]), encoding="utf-8")
    spans = {"ssep": SSEP, "pdep": PDEP, "pad": PAD, "policy": policy, "hold_share": hold_share}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        "additional_config": {CONFIG_KEY: spans},
        **settings,
    }
    return EngineArgs(**arguments).create_engine_config()


@dataclass
class Served:
    """A request under way."""

    request: Any
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    figures: dict[str, Any] | None = None
    num_cached: int | None = None
    first_step: int | None = None
    """The step that its first token came from."""


class StepRig:
    """A scheduler that is stepped by hand.

    Args:
        folder: for the model's shape.
        policy: of spans.
        num_blocks: of the cache, the null block not counted.
        ahead: steps scheduled before the first one's output comes back: 0 as on a CPU, 1 as vLLM
            does on CUDA.
        hold_share: see `SpanConfig`.
        log_stats: as vLLM's own.
        settings: of vLLM.
    """

    def __init__(
        self,
        folder: Path,
        policy: str = "interleaved",
        *,
        num_blocks: int = 2000,
        ahead: int = 0,
        hold_share: float = 0.25,
        log_stats: bool = False,
        **settings: Any,
    ) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.engine import core
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from minipic_backend.plugin.scheduler import AsyncSpanScheduler, SpanScheduler

        config = _vllm_config(folder, policy, hold_share, **settings)
        config.cache_config.num_gpu_blocks = num_blocks + 1
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        init_none_hash(sha256)
        self.scheduler: Any = (AsyncSpanScheduler if ahead else SpanScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=log_stats,
        )
        self.hasher = core.get_request_block_hasher(BLOCK_SIZE, sha256)
        self.config: SpanConfig = self.scheduler.span_config
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.served: dict[str, Served] = {}
        self.num_steps = 0
        self.steps: list[dict[str, int]] = []
        self.computed: Counter[bytes] = Counter()
        """How often each block of a prompt was computed, by hash."""
        self._ahead = ahead
        self._pending: deque[tuple[Any, Any]] = deque()
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[int]] = {}
        self._held: dict[int, Any] = {}
        self._loads: dict[str, Any] = {}
        self._names = (f"request-{n}" for n in itertools.count())
        self._watch_jobs()

    # ---- requests ---------------------------------------------------------------------------

    def add(
        self,
        token_ids: Sequence[int],
        options: SpanOptions | None = None,
        *,
        num_tokens: int = 1,
        name: str | None = None,
        **fields: Any,
    ) -> Served:
        request = Request(
            request_id=name or next(self._names),
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(
                **{
                    "temperature": 0.0,
                    "max_tokens": num_tokens,
                    "ignore_eos": True,
                    "extra_args": {CONFIG_KEY: options.to_dict()} if options else None,
                    **fields.pop("sampling", {}),
                }
            ),
            pooling_params=None,
            block_hasher=self.hasher,
            **fields,
        )
        served = self.served[request.request_id] = Served(request)
        self._requests[request.request_id] = request
        self.scheduler.add_request(request)
        return served

    def abort(self, served: Served) -> None:
        self.scheduler.finish_requests(served.request.request_id, RequestStatus.FINISHED_ABORTED)
        served.finished = True

    def run(self, token_ids: Sequence[int], options: SpanOptions | None = None) -> Served:
        """One request, to its end."""
        served = self.add(token_ids, options)
        self.finish()
        return served

    def hashes(
        self, token_ids: Sequence[int], extra_args: Any = None, **fields: Any
    ) -> list[bytes]:
        """Hashes of a prompt's blocks."""
        request = Request(
            request_id="probe",
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1, extra_args=extra_args),
            pooling_params=None,
            block_hasher=self.hasher,
            **fields,
        )
        self.hasher.read(request)
        request.update_block_hashes()
        return list(request.block_hashes)

    # ---- steps ------------------------------------------------------------------------------

    def step(self) -> dict[str, int]:
        """Schedules and computes one step; its tokens of each request, internal ones too."""
        output = self.scheduler.schedule()
        self.num_steps += 1
        scheduled: dict[str, int] = dict(output.num_scheduled_tokens)
        self._pending.append((output, self._execute(output)))
        if scheduled:
            self.steps.append(scheduled)
        if len(self._pending) > self._ahead or not scheduled:
            self._take_output()
        return scheduled

    @property
    def pending(self) -> bool:
        """Whether the output of a step is still to be taken."""
        return bool(self._pending)

    def advance(self) -> None:
        """A step, or what is left to be taken of earlier ones."""
        if self.scheduler.has_requests():
            self.step()
        else:
            self._take_output()

    def finish(self, max_steps: int = 5000) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._pending:
                return
            self.advance()
        raise AssertionError(f"still not done: {list(self.scheduler.requests)}")

    def reset(self) -> None:
        """An empty cache, and no counts."""
        assert self.scheduler.reset_prefix_cache()
        self.computed.clear()
        self.steps.clear()

    def assert_idle(self) -> None:
        """No block is used, and nothing is remembered of any request."""
        scheduler, planner = self.scheduler, self.scheduler.planner
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks[1:])
        left = (
            scheduler.requests, scheduler.running, scheduler.waiting, scheduler.deferred_waiting,
            scheduler.span_figures, planner._plans, planner._jobs, planner._by_id,
            planner._in_place, planner.holds._held,
        )  # fmt: skip
        assert not any(left), left
        assert planner.holds.num_blocks == 0

    def _take_output(self) -> None:
        output, results = self._pending.popleft()
        for of_client in self.scheduler.update_from_output(output, results).values():
            for one in of_client.outputs:
                served = self.served[one.request_id]  # an internal request would fail here
                served.tokens += one.new_token_ids
                if one.prefill_stats is not None:
                    served.num_cached = one.prefill_stats.num_cached_tokens
                if one.finish_reason is not None:
                    served.finished = True
                    served.figures = (one.kv_transfer_params or {}).get(CONFIG_KEY)

    # ---- the worker -------------------------------------------------------------------------

    def _watch_jobs(self) -> None:
        before = self.scheduler.waiting.before

        def watched(request: Any) -> list[Any]:
            jobs: list[Any] = before(request)
            self._requests.update((job.request_id, job) for job in jobs)
            return jobs

        self.scheduler.waiting.before = watched

    def _execute(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._check_segments(new)
            self._tables[new.req_id] = list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(blocks[0])
            elif blocks:
                self._tables[request_id] += blocks[0]
            starts[request_id] = cached.num_computed_tokens[index]
        assert set(starts) == set(output.num_scheduled_tokens)
        first = {i for i in starts if i in {new.req_id for new in output.scheduled_new_reqs}}
        first |= set(cached.resumed_req_ids)
        # As in a layer of a model: all keys are written, then all are read.
        for request_id, start in starts.items():
            self._write(request_id, start, output.num_scheduled_tokens[request_id])
        for request_id in first:
            self._check_hits(request_id, starts[request_id])
        loaded = self._load()
        names = list(starts)
        sampled = [self._sample(i, starts[i] + output.num_scheduled_tokens[i]) for i in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(finished_recving=loaded) if loaded else None,
        )

    def _check_segments(self, new: Any) -> None:
        """What the scheduler read of a prompt goes along, and is what a worker would read."""
        fields = ("prompt_token_ids", "sampling_params", "mm_features", "prompt_embeds")
        bare = SimpleNamespace(**{name: getattr(new, name) for name in fields})
        table = worker_segments(bare, self.config)
        assert worker_segments(new, self.config) == table
        assert hasattr(new, "minipic_table") == (new.req_id in self.served)
        if new.req_id not in self.served and table is not None:
            # A job whose blocks depend on options: it is computed with those of its hashes.
            job = self._requests[new.req_id]
            hashes = self.hashes(
                job.prompt_token_ids,
                job.sampling_params.extra_args,
                cache_salt=job.cache_salt,
                lora_request=job.lora_request,
            )
            assert hashes == job.block_hashes[: len(hashes)]

    def _load(self) -> set[str]:
        """What a connector asked for in an earlier step is there now; the requests it is for."""
        connector = self.scheduler.connector
        if connector is None:
            return set()
        done, self._loads = self._loads, dict(connector.loads)
        connector.loads.clear()
        for blocks, hashes in done.values():
            self._held.update(zip(blocks, hashes, strict=True))
        return set(done)

    def _write(self, request_id: str, start: int, count: int) -> None:
        request, table = self._requests[request_id], self._tables[request_id]
        for index in range(start // BLOCK_SIZE, -(-(start + count) // BLOCK_SIZE)):
            end = min(start + count, (index + 1) * BLOCK_SIZE)
            is_job = request_id not in self.served
            # A job leaves out the pads behind its last token, which nobody sees.
            whole = end == (index + 1) * BLOCK_SIZE or (is_job and end == request.num_prompt_tokens)
            known = index < len(request.block_hashes)
            if whole and known and end <= request.num_prompt_tokens:
                block_hash = bytes(request.block_hashes[index])
                self._held[table[index]] = block_hash
                self.computed[block_hash] += 1
            elif not (whole and known and self._held.get(table[index]) is None):
                self._held[table[index]] = None  # generated tokens, or not whole

    def _check_hits(self, request_id: str, num_computed: int) -> None:
        request, table = self._requests[request_id], self._tables[request_id]
        for index in range(num_computed // BLOCK_SIZE):
            held = self._held[table[index]]
            assert held in (None, bytes(request.block_hashes[index])), (request_id, index)

    def _sample(self, request_id: str, num_computed: int) -> list[int]:
        request = self._requests[request_id]
        if num_computed < request.num_tokens:
            return []
        served = self.served.get(request_id)
        if served is not None and served.first_step is None:
            served.first_step = self.num_steps
        return [10 + (num_computed * 7 + len(request.prompt_token_ids)) % 900]


# ---- prompts ------------------------------------------------------------------------------------


def _words(seed: int, count: int) -> list[int]:
    return [10 + (seed * 7919 + i * 31) % 900 for i in range(count)]


def prefix(number: int = 0, num_blocks: int = 2) -> list[int]:
    return _words(1000 + number, num_blocks * BLOCK_SIZE)


def span(number: int, num_blocks: int = 3) -> list[int]:
    body = _words(number, num_blocks * BLOCK_SIZE - 4)
    return [SSEP, *body, PAD, PAD, PAD]


def dependent(number: int = 0, count: int = 20) -> list[int]:
    return [PDEP, *_words(5000 + number, count - 1)]


def prompt(
    *documents: int, question: int = 0, system: int = 0, text: int | None = None
) -> list[int]:
    """[prefix][SSep d]…[PDep question], or [prefix][PDep text][SSep d]…[PDep question]."""
    body = [token for number in documents for token in span(number)]
    behind = [] if text is None else [*dependent(text, 2 * BLOCK_SIZE - 3), PAD, PAD, PAD]
    return [*prefix(system), *behind, *body, *dependent(question)]
