"""Every name of vLLM that `docs/contracts.md` lists is there, with the shape that we rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

# Dotted name below `vllm.` → parameters that we pass or receive, in order; None: only that it is.
CALLABLES: dict[str, list[str] | None] = {
    "engine.arg_utils.EngineArgs.create_engine_config": ["self", "usage_context", "headless"],
    "v1.engine.input_processor.InputProcessor.process_inputs": [
        "self", "request_id", "prompt", "params", "supported_tasks", "arrival_time",
        "lora_request", "tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank",
        "resumable", "session_id", "kv_hints",
    ],
    "renderers.online_renderer.OnlineRenderer.preprocess_chat": [
        "self", "request", "messages", "default_template", "default_template_content_format",
        "default_template_kwargs", "tool_dicts", "parser", "skip_mm_cache",
    ],
    "renderers.online_renderer.OnlineRenderer.preprocess_completion": [
        "self", "request", "prompt_input", "prompt_embeds", "skip_mm_cache",
    ],
    "renderers.base.BaseRenderer.validate_token_ids": ["self", "token_ids", "parameter"],
    "entrypoints.anthropic.serving.AnthropicServingMessages._build_base_request": [
        "anthropic_request", "openai_messages",
    ],
    "entrypoints.anthropic.serving.AnthropicServingMessages._convert_system_message": [
        "anthropic_request", "openai_messages", "merge_inline_system",
    ],
    "entrypoints.anthropic.serving.AnthropicServingMessages._convert_message_content": [
        "msg", "openai_msg", "openai_messages",
    ],
    "entrypoints.anthropic.serving.AnthropicServingMessages._convert_block": [
        "block", "role", "content_parts", "tool_calls", "reasoning_parts", "openai_messages",
    ],
    "entrypoints.anthropic.serving.AnthropicServingMessages._convert_user_tool_result": [
        "block", "openai_messages",
    ],
    "entrypoints.anthropic.api_router.create_messages": ["request", "raw_request"],
    "entrypoints.anthropic.api_router.count_tokens": ["request", "raw_request"],
    "entrypoints.serve.utils.api_utils.validate_json_request": ["raw_request"],
    "entrypoints.serve.utils.api_utils.cli_env_setup": [],
    "entrypoints.cli.serve.ServeSubcommand.cmd": ["args"],
    "entrypoints.cli.serve.ServeSubcommand.subparser_init": ["self", "subparsers"],
    "logger.configure_logging_from_args": ["args"],
    "utils.argparse_utils.FlexibleArgumentParser": None,
    "distributed.kv_transfer.has_kv_transfer_group": [],
    "v1.engine.core.get_request_block_hasher": ["hash_block_size", "caching_hash_fn"],
    "v1.attention.backends.registry.register_backend": ["backend", "class_path", "is_mamba"],
    "v1.attention.selector._cached_get_attn_backend.cache_clear": None,
    "v1.core.block_pool.BlockPool.get_cached_block": ["self", "block_hash", "kv_cache_group_ids"],
    "v1.core.kv_cache_utils.generate_block_hash_extra_keys": [
        "request", "start_token_idx", "end_token_idx", "start_mm_idx",
    ],
    "v1.core.sched.scheduler.Scheduler.add_request": ["self", "request"],
    "v1.core.sched.scheduler.Scheduler.finish_requests": ["self", "request_ids", "finished_status"],
    "v1.core.sched.scheduler.Scheduler.schedule": ["self", "throttle_prefills"],
    "v1.core.sched.scheduler.Scheduler.update_from_output": [
        "self", "scheduler_output", "model_runner_output",
    ],
    "v1.core.sched.scheduler.Scheduler.make_stats": None,
    "v1.core.sched.scheduler.Scheduler.reset_prefix_cache": None,
    "v1.core.sched.scheduler.Scheduler._handle_blocked_waiting_request": ["self", "request"],
    "v1.core.sched.scheduler.Scheduler._preempt_request": [
        "self", "request", "timestamp", "drop_stale_output",
    ],
    "v1.core.sched.request_queue.FCFSRequestQueue.peek_request": ["self"],
    "v1.core.sched.request_queue.PriorityRequestQueue.peek_request": ["self"],
    "v1.core.kv_cache_manager.KVCacheManager.allocate_slots": [
        "self", "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks",
        "num_lookahead_tokens", "num_external_computed_tokens", "delay_cache_blocks",
        "num_encoder_tokens", "full_sequence_must_fit", "reserved_blocks", "has_scheduled_reqs",
        "skip_zeroing_group_ids",
    ],
    "v1.core.kv_cache_manager.KVCacheManager.record_prefix_cache_stats": [
        "self", "request", "num_hits",
    ],
    "v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks": [
        "self", "request", "num_computed_tokens",
    ],
    "v1.core.kv_cache_utils.make_block_hash_with_group_id": ["block_hash", "group_id"],
    "v1.core.block_pool.BlockHashToBlockMap.get_one_block": ["self", "key"],
    "v1.core.block_pool.BlockPool.touch": ["self", "blocks"],
    "v1.core.block_pool.BlockPool.free_blocks": ["self", "ordered_blocks"],
    "v1.core.block_pool.BlockPool.evict_blocks": ["self", "block_ids"],
    "v1.core.block_pool.BlockPool._build_block_stored_event": [
        "self", "request", "block_hashes", "parent_block_hash", "start_token_idx", "end_token_idx",
        "block_size", "kv_cache_group_id", "extra_keys_list",
    ],
    "v1.metrics.loggers.StatLoggerManager.__init__": None,
    "v1.core.sched.async_scheduler.AsyncScheduler.__init__": None,
    "v1.worker.cpu_worker.CPUWorker.init_device": ["self"],
    "v1.worker.cpu_model_runner.CPUModelRunner.load_model": ["self", "load_dummy_weights"],
    "v1.worker.gpu_model_runner.GPUModelRunner._prepare_inputs": [
        "self", "scheduler_output", "num_scheduled_tokens",
    ],
    "v1.worker.gpu_model_runner.GPUModelRunner._build_attention_metadata": None,
    "v1.worker.gpu_model_runner.GPUModelRunner._sample": ["self", "logits", "spec_decode_metadata"],
    "v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync": [
        "self", "scheduler_output", "sampler_output", "logits", "hidden_states",
        "num_scheduled_tokens",
    ],
    "v1.worker.gpu_model_runner.GPUModelRunner._on_request_state_removed": [
        "self", "req_id", "req_state",
    ],
    "v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder.build": [
        "self", "common_prefix_len", "common_attn_metadata", "fast_build",
    ],
    "v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.forward": [
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
        "output_scale", "output_block_scale",
    ],
    "v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update": [
        "self", "layer", "key", "value", "kv_cache", "slot_mapping",
    ],
    "_custom_ops.cpu_attention_with_kv_cache": None,
    "tool_parsers.ToolParserManager.get_tool_parser": ["name"],
    "tool_parsers.ToolParser.__init__": ["self", "tokenizer", "tools"],
    "tool_parsers.ToolParser.extract_tool_calls": ["self", "model_output", "request"],
    "tool_parsers.ToolParser.extract_tool_calls_streaming": [
        "self", "previous_text", "current_text", "delta_text", "previous_token_ids",
        "current_token_ids", "delta_token_ids", "request",
    ],
    "tool_parsers.ToolParser.get_remaining_unstreamed_args": ["self"],
    "entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": None,
    "v1.worker.gpu_worker.Worker._make_model_runner": ["self"],
    "v1.worker.gpu.model_runner.GPUModelRunner.load_model": None,
    "v1.worker.gpu.model_runner.GPUModelRunner.initialize_kv_cache": None,
    "v1.worker.gpu.model_runner.GPUModelRunner.gather_batch_req_state": [
        "self", "scheduler_output", "dummy_run",
    ],
    "v1.worker.gpu.model_states.default.DefaultModelState.add_request": [
        "self", "req_index", "new_req_data",
    ],
    "v1.worker.gpu.model_states.default.DefaultModelState.remove_request": ["self", "req_id"],
    "v1.worker.gpu.model_states.default.DefaultModelState.prepare_attn": [
        "self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups",
        "kv_cache_config", "for_capture", "ubatch_idx", "model_specific_attn_metadata",
    ],
    "v1.worker.gpu.model_states.interface.ModelSpecificAttnMetadata.get_extra_attn_kwargs": [
        "self", "attn_metadata_builder", "num_reqs",
    ],
    "v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.capture": None,
    "v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.run_fullgraph": ["self", "desc"],
    "v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.dispatch": [
        "self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras",
        "max_query_len", "num_ubatches",
    ],
    "v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor": [
        "cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "max_query_len",
        "num_active_loras", "num_ubatches",
    ],
    "v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager._resolve_effective_loras": [
        "self", "num_active_loras",
    ],
    "v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder.build": [
        "self", "common_prefix_len", "common_attn_metadata", "fast_build",
    ],
    "v1.attention.backends.flash_attn.FlashAttentionImpl.forward": [
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
        "output_scale", "output_block_scale",
    ],
    "utils.torch_utils.async_tensor_h2d": ["data", "device", "dtype", "out"],
    "v1.engine.llm_engine.LLMEngine.add_request": [
        "self", "request_id", "prompt", "params", "arrival_time", "lora_request",
        "tokenization_kwargs", "trace_headers", "priority", "session_id", "prompt_text", "kv_hints",
    ],
    "lora.request.LoRARequest": None,
    "v1.engine.llm_engine.LLMEngine.step": ["self"],
    "v1.engine.llm_engine.LLMEngine.reset_prefix_cache": None,
    "v1.engine.llm_engine.LLMEngine.abort_request": ["self", "request_ids", "internal"],
    "renderers.base.BaseRenderer.render_cmpl": None,
    "distributed.cleanup_dist_env_and_memory": None,
    "exceptions.VLLMValidationError": None,
}  # fmt: skip

FIELDS: dict[str, set[str]] = {
    "engine.arg_utils.EngineArgs": {
        "additional_config", "block_size", "enable_prefix_caching", "scheduler_cls", "worker_cls",
        "attention_backend", "tokenizer", "tokenizer_mode", "trust_remote_code",
        "tokenizer_revision", "kv_cache_memory_bytes", "enforce_eager", "enable_lora", "max_loras",
        "max_lora_rank",
    },
    "config.kv_transfer.KVTransferConfig": {"kv_connector"},
    "config.kv_events.KVEventsConfig": {"enable_kv_cache_events"},
    "config.vllm.VllmConfig": {"kv_transfer_config", "kv_events_config", "additional_config"},
    "v1.metrics.stats.SchedulerStats": {
        "num_kv_fetch_reqs_by_stage", "num_running_reqs", "num_waiting_reqs",
        "num_skipped_waiting_reqs",
    },
    "v1.metrics.stats.PrefillStats": {
        "num_prompt_tokens", "num_cached_tokens", "num_local_cached_tokens",
        "num_external_cached_tokens",
    },
    "v1.attention.backend.CommonAttentionMetadata": {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens",
        "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping",
        "seq_lens_cpu_upper_bound", "is_prefilling",
    },
    "v1.attention.backends.cpu_attn.CPUAttentionMetadata": {
        "query_start_loc", "seq_lens", "block_table", "scheduler_metadata", "num_actual_tokens",
    },
    "v1.worker.gpu.input_batch.InputBatch": {
        "req_ids", "num_reqs", "num_reqs_after_padding", "num_computed_tokens_np",
        "num_scheduled_tokens", "query_start_loc_np", "positions",
    },
}  # fmt: skip

MODEL_FIELDS: dict[str, set[str]] = {
    "entrypoints.openai.completion.protocol.CompletionRequest": {
        "prompt", "stream_options", "return_token_ids", "return_tokens_as_token_ids",
        "cache_salt", "priority", "request_id", "vllm_xargs", "structured_outputs",
    },
    "entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": {
        "vllm_xargs", "kv_transfer_params", "cache_salt", "echo",
    },
    "entrypoints.anthropic.protocol.AnthropicMessagesRequest": {"system", "messages", "vllm_xargs"},
    "entrypoints.anthropic.protocol.AnthropicContentBlock": {"type", "text", "source", "content"},
}  # fmt: skip

SOURCE_HOLDS: dict[str, list[str]] = {
    # What an ended engine process must wake.
    "v1.engine.core_client.SyncMPClient.get_output": [
        "self.outputs_queue.get()", "isinstance(outputs, Exception)", "raise self",
    ],
    "v1.engine.core_client.SyncMPClient.call_utility": [
        "self.utility_results[call_id] = future", "future.result()",
    ],
    "v1.engine.utils.CoreEngineProcManager.__init__": ["self.processes"],
    # Ready token ids skip the template, not what comes behind it.
    "renderers.online_renderer.OnlineRenderer.preprocess_chat": [
        "_reused_prompt_token_ids(request", "tokens_input(", "adjust_request(",
    ],
    # Span options that rendering has left in `vllm_xargs` reach the engine.
    "entrypoints.openai.chat_completion.serving.OpenAIServingChat._create_chat_completion": [
        "self.render_chat_request(request)", "request.to_sampling_params(",
    ],
    # State is complete when endpoint plugins get it.
    "entrypoints.launchers.api_server.app_state.init_app_state": [
        "state.online_renderer = ", "init_generate_state", "init_endpoint_plugins_state(",
    ],
    # The order that we count on: the scheduler first, then the hasher, by the module's own name.
    "v1.engine.core.EngineCore.__init__": ["self.scheduler: ", "get_request_block_hasher("],
    # Slots are taken from the positions, then positions may change.
    "v1.worker.gpu_model_runner.GPUModelRunner._prepare_inputs": [
        "self.positions[:total_num_scheduled_tokens] = (", "compute_slot_mapping(",
    ],
    "v1.worker.gpu.model_runner.GPUModelRunner.execute_model": [
        "self.gather_batch_req_state(", "dispatch_cg_and_sync_dp(",
        "self.prepare_attn(input_batch)",
        "self.model_state.prepare_attn(", "self.model_state.prepare_inputs(",
    ],
    "v1.attention.backends.flash_attn.FlashAttentionImpl.forward": [
        "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",
    ],
    "v1.engine.core.EngineCore.shutdown": [
        "self.structured_output_manager.clear_backend()", "self.model_executor.shutdown()",
        "self.scheduler.shutdown()", "gc.unfreeze()", "cleanup_dist_env_and_memory()",
    ],
    "v1.request.Request.__init__": [
        "self.max_tokens = sampling_params.max_tokens", "self.abort_immediately =",
    ],
    # What a preempted request is still to get; the scheduler passes it over until then.
    "v1.core.sched.scheduler.Scheduler._preempt_request": [
        "request.drop_stale_output = ",
        "request.num_stale_output_tokens = request.num_in_flight_tokens",
    ],
    "v1.core.sched.scheduler.Scheduler.make_stats": [
        "if not self.log_stats:", "num_deferred = len(self.deferred_waiting)",
        "num_waiting_reqs=num_waiting - num_deferred,", "num_skipped_waiting_reqs=num_deferred,",
    ],
    "v1.core.sched.utils.check_stop": ["request.num_output_tokens >= request.max_tokens"],
    "v1.engine.core.EngineCore.add_request": ["if request.abort_immediately:"],
    # Requests are made on a thread that takes them in, and read and hashed on the scheduler's.
    "v1.engine.core.EngineCoreProc.process_input_sockets": ["self.preprocess_add_request(req)"],
    # Ready ids of a chat are taken unless it is to be echoed or holds more than text.
    "renderers.online_renderer._reused_prompt_token_ids": [
        'kv.pop("prompt_token_ids", None)', 'getattr(request, "echo", False)',
        "has_non_text_content(messages)", "return ids",
    ],
    # The one KV connector that spans go with.
    "config.vllm.VllmConfig._post_init_kv_transfer_config": [
        'config_connector = "OffloadingConnector"',
    ],
    "distributed.kv_transfer.kv_connector.v1.offloading.scheduler.RequestOffloadState."
    "update_offload_keys": ["self.req.block_hashes,", "make_offload_key(req_block_hash,"],
    "v1.request.Request.append_output_token_ids": ["self.update_block_hashes()"],
    # A request's jobs go in front of it when it is peeked at, and publish what they compute when
    # they are allocated: the request behind them reads it in the same step.
    "v1.core.sched.scheduler.Scheduler.schedule": [
        "request = request_queue.peek_request()", "self._handle_blocked_waiting_request(request)",
        "self._get_local_prefix_cache_hit(request)", "request.prefill_stats.set(",
        "self.kv_cache_manager.allocate_slots(\n                    request,\n                    "
        "num_tokens_past_hit,", "request = request_queue.pop_request()",
        "self._update_after_schedule(scheduler_output)",
    ],
    "v1.core.kv_cache_manager.KVCacheManager.allocate_slots": [
        "self.coordinator.cache_blocks(request, num_tokens_to_cache)",
    ],
    # A block's key in the cache: its hash, then the group.
    "v1.core.kv_cache_utils.make_block_hash_with_group_id": [
        'block_hash + group_id.to_bytes(4, "big", signed=False)',
    ],
    # A job that was ended right behind `schedule` is not looked for any more. How a request ends
    # that turns out to be wrong while it waits.
    "v1.core.sched.scheduler.Scheduler.update_from_output": [
        "request = self.requests.get(req_id)", "if request is None or request.is_finished():",
        "kv_transfer_params=kv_transfer_params,",
        "set(self.grammar_compile_error_reqs)", "error_reqs = self.finish_requests(",
    ],
    # The logger that takes our counts out of the statistics is the first of the list.
    "v1.metrics.loggers.StatLoggerManager.record": ["for stat_logger in self.stat_loggers:"],
}  # fmt: skip


def resolve(name: str) -> Any:
    """The object at `vllm.<name>`: the longest importable module, then attributes."""
    parts = ["vllm", *name.split(".")]
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", CALLABLES)
def test_callable_is_there_with_its_parameters(name: str) -> None:
    found = resolve(name)
    assert callable(found)
    expected = CALLABLES[name]
    if expected is not None:
        # The installed package is itself a plugin: look behind our own hook.
        stock = getattr(found, "minipic_stock", found)
        assert list(inspect.signature(stock).parameters) == expected


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_there(name: str) -> None:
    found = resolve(name)
    assert FIELDS[name] <= set(found.__dataclass_fields__)


@pytest.mark.parametrize("name", MODEL_FIELDS)
def test_fields_of_requests_are_there(name: str) -> None:
    assert set(resolve(name).model_fields) >= MODEL_FIELDS[name]


def test_varlen_attention_takes_what_we_pass() -> None:
    """Its modules can be imported on CUDA only: read."""
    root = Path(importlib.import_module("vllm").__file__ or "").parent
    taken_from = ast.parse((root / "v1/attention/backends/fa_utils.py").read_text("utf-8"))
    assert any(
        isinstance(node, ast.ImportFrom)
        and node.module == "vllm.vllm_flash_attn"
        and "flash_attn_varlen_func" in {name.name for name in node.names}
        for node in ast.walk(taken_from)
    )
    interface = ast.parse((root / "vllm_flash_attn/flash_attn_interface.py").read_text("utf-8"))
    (found,) = (
        node
        for node in interface.body
        if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
    )
    assert {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)} >= {
        "q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k",
        "softmax_scale", "causal", "softcap", "out", "fa_version",
    }  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there on Linux only")
def test_triton_compiles_side_by_side_as_we_ask_it_to() -> None:
    from concurrent.futures import Future

    from triton.runtime import _async_compile, jit

    mode = _async_compile.AsyncCompileMode
    assert next(iter(inspect.signature(mode).parameters)) == "executor"
    assert mode(None).future_kernels == {}
    compiled: Future[str] = Future()
    compiled.set_result("a kernel")
    pool = type("Pool", (), {"submit": lambda self, function: compiled})()
    with mode(pool) as active:
        assert _async_compile.active_mode.get() is active
        active.submit("key", lambda: None, lambda kernel: None, lambda future: None)
        assert len(active.future_kernels) == 1
    assert _async_compile.active_mode.get() is None
    assert "warmup" in inspect.signature(jit.JITFunction.run).parameters
    source = inspect.getsource(jit.JITFunction)
    assert "_async_compile.active_mode.get()" in source
    assert "async_mode.submit(" in source
    assert "self.run(grid=grid, warmup=False" in inspect.getsource(jit.KernelInterface)


def test_marks_on_content_parts_survive() -> None:
    chat = resolve("entrypoints.openai.chat_completion.protocol.ChatCompletionRequest")
    part = {"type": "text", "text": "x", "minipic": {"span": True}}
    request = chat(messages=[{"role": "user", "content": [part]}], minipic={"late": 0})
    assert request.messages[0]["content"] == [part]
    assert request.model_extra == {"minipic": {"late": 0}}


@pytest.mark.parametrize("name", SOURCE_HOLDS)
def test_steps_come_in_the_order_that_we_count_on(name: str) -> None:
    source = inspect.getsource(resolve(name))
    places = [source.find(step) for step in SOURCE_HOLDS[name]]
    assert -1 not in places, SOURCE_HOLDS[name][places.index(-1)]
    assert places == sorted(places)


def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    from minipic_backend.errors import ConfigurationError
    from minipic_backend.plugin import seams

    seams.check_vllm_version()
    monkeypatch.setattr(vllm.version, "__version__", "0.33.0")
    with pytest.raises(ConfigurationError, match=r"0\.33\.0"):
        seams.check_vllm_version()


def test_hasher_is_replaced_for_one_call_only() -> None:
    from vllm.v1.engine import core

    from minipic_backend.plugin import seams

    stock = core.get_request_block_hasher
    made = []
    seams.replace_next_block_hasher(lambda *args: made.append(args) or "ours")
    assert core.get_request_block_hasher(16, hash) == "ours"  # type: ignore[comparison-overlap]
    assert core.get_request_block_hasher is stock
    assert made[0][1:] == (16, hash)


def test_hasher_of_a_start_that_failed_is_taken_back() -> None:
    from vllm.v1.engine import core

    from minipic_backend.plugin import seams

    stock = core.get_request_block_hasher
    seams.replace_next_block_hasher(lambda *args: "the first")
    seams.replace_next_block_hasher(lambda *args: "the second")  # its start failed too
    seams.restore_block_hasher()
    assert core.get_request_block_hasher is stock
    seams.restore_block_hasher()
    assert core.get_request_block_hasher is stock


def test_driver_takes_the_hasher_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import core, llm_engine
    from vllm.v1.executor import Executor

    from minipic_backend.engines.driver import EngineDriver
    from minipic_backend.plugin import seams

    def start(**kwargs: Any) -> None:
        seams.replace_next_block_hasher(lambda *args: "ours")
        raise RuntimeError("no room")

    config = SimpleNamespace(kv_transfer_config=None)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: config)
    monkeypatch.setattr(Executor, "get_class", lambda config: None)
    monkeypatch.setattr(llm_engine, "LLMEngine", start)
    stock = core.get_request_block_hasher
    with pytest.raises(RuntimeError, match="no room"):
        EngineDriver._start(SimpleNamespace(_separate_process=False), {})  # type: ignore[arg-type]
    assert core.get_request_block_hasher is stock


def test_backend_override_ends_with_its_context() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from minipic_backend.plugin import seams

    before = AttentionBackendEnum.CPU_ATTN.get_path()
    with seams.attention_backend("CPU_ATTN", "minipic_backend.plugin.cpu_attention.SpanCPUBackend"):
        assert AttentionBackendEnum.CPU_ATTN.get_path().endswith("SpanCPUBackend")
    assert AttentionBackendEnum.CPU_ATTN.get_path() == before


def test_kernels_are_looked_for_beside_objects_that_answer_to_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As llvmlite's library wrapper does; numba brings it into any process."""
    import sys
    import types

    from vllm.triton_utils import dispatcher

    from minipic_backend.plugin import seams

    class Odd:
        __slots__ = ()

        def __getattr__(self, name: str) -> object:
            return object()

    module = types.ModuleType("a_module_with_an_odd_object")
    module.odd = Odd()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises((AttributeError, TypeError)):
        dispatcher._rebind_kernels([])  # vLLM by itself: once it passes, drop our seam
    with seams.modules_with_odd_objects():
        dispatcher._rebind_kernels([])
    assert "vars" not in vars(dispatcher)


def test_threads_of_an_engine_process_take_turns_often() -> None:
    """And of no other: not of a program that has an engine inside."""
    from minipic_backend.plugin import seams

    before = sys.getswitchinterval()
    process = multiprocessing.current_process()
    name = process.name
    try:
        seams.share_interpreter()
        assert sys.getswitchinterval() == before
        process.name = "EngineCore_DP0"
        seams.share_interpreter()
        assert sys.getswitchinterval() < before
    finally:
        process.name = name
        sys.setswitchinterval(before)
    source = inspect.getsource(importlib.import_module("vllm.v1.engine.utils"))
    assert '"EngineCore"' in source


IMPORT_INTERNALS = {
    "plugin", "server", "engines/driver.py", "cli/serve.py", "tools/vllm_parser.py",
    "bench/engines.py",
}  # fmt: skip
FOR_USERS = {
    "vllm", "vllm.engine.arg_utils", "vllm.exceptions", "vllm.lora.request", "vllm.platforms",
    "vllm.sampling_params", "vllm.version",
}  # fmt: skip


def imported_from_vllm(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.split(".")[0] == "vllm"}


def test_internals_are_imported_where_the_page_says() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "contracts.md").read_text(encoding="utf-8")
    for name in IMPORT_INTERNALS:
        assert f"`minipic_backend/{name}" in page
    reaching: set[str] = set()
    for folder in (root / "minipic_backend", root / "integrations"):
        for path in folder.rglob("*.py"):
            if imported_from_vllm(path) - FOR_USERS:
                inside = path.relative_to(folder)
                whole = inside.parts[0] in ("plugin", "server")
                reaching.add(inside.parts[0] if whole else inside.as_posix())
    assert reaching == IMPORT_INTERNALS


def test_every_listed_name_is_in_the_page_and_back() -> None:
    page = (Path(__file__).parent.parent / "docs" / "contracts.md").read_text(encoding="utf-8")
    for name in ["OnlineRenderer", "process_inputs", "AnthropicServingMessages", "ServeSubcommand"]:
        assert name in page
    for name in ["triton.runtime._async_compile", "fa_utils.flash_attn_varlen_func"]:
        assert name in page
    for name in ["SpanScheduler", "SpanCPUWorker", "SpanModelState", "SpanCudaGraphManager"]:
        assert name in page
