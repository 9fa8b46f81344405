"""Turns `additional_config={"minipic": {…}}` into a complete, checked configuration.

Runs in the process that parses vLLM's arguments, before the configuration is built. What it
leaves in `additional_config` reaches every other process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipic_backend.config import CONFIG_KEY, SpanConfig
from minipic_backend.errors import ConfigurationError, UnsupportedModelError
from minipic_backend.layout.markers import choose_markers
from minipic_backend.plugin import seams
from minipic_backend.plugin.metrics import span_stat_logger

__all__ = [
    "CUDA_CACHE_DTYPES",
    "DEFAULT_BLOCK_SIZE",
    "check_config",
    "check_layer_cache",
    "enable_spans",
    "span_config",
]

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}
"""vLLM's own default on a CPU is 128, most of which a short document would leave as pads."""


_CONNECTORS = ("OffloadingConnector",)
"""That are known to key what they keep by `request.block_hashes`."""

_BY_ITSELF = f"additional_config={{{CONFIG_KEY!r}: {{}}}} sets it: leave it to that"

_CACHE_DTYPES = ("auto", "bfloat16", "float16")
CUDA_CACHE_DTYPES = (*_CACHE_DTYPES, "fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class _Parts:
    """Classes of ours that vLLM is told to use, and the KV caches that they read."""

    scheduler: str
    worker: str
    cache_dtypes: tuple[str, ...]


_PARTS = {
    "cpu": _Parts(
        "minipic_backend.plugin.scheduler.SpanScheduler",
        "minipic_backend.plugin.cpu_worker.SpanCPUWorker",
        _CACHE_DTYPES,
    ),
    "cuda": _Parts(
        "minipic_backend.plugin.scheduler.AsyncSpanScheduler",
        "minipic_backend.plugin.cuda_worker.SpanCudaWorker",
        CUDA_CACHE_DTYPES,
    ),
}


def enable_spans(engine_args: Any) -> None:
    """Completes vLLM's `EngineArgs` in place so that every part of the plugin is used.

    Raises:
        ConfigurationError: an unknown option, or one of vLLM's that excludes spans.
        MarkerError: the tokenizer has no tokens left for markers.
    """
    seams.check_vllm_version()
    platform = _platform()
    parts = _PARTS[platform]
    given = dict(engine_args.additional_config[CONFIG_KEY] or {})
    markers = given.pop("markers", None)
    if engine_args.block_size is None:
        engine_args.block_size = DEFAULT_BLOCK_SIZE[platform]
    if not {"ssep", "pdep", "pad"} <= set(given):
        chosen = choose_markers(_tokenizer(engine_args), configured=markers)
        given |= {"ssep": chosen.ssep, "pdep": chosen.pdep, "pad": chosen.pad}
    given.setdefault("block_size", engine_args.block_size)
    config = SpanConfig.from_dict(given)
    if config.block_size != engine_args.block_size:
        raise ConfigurationError(
            f"block_size={config.block_size} in {CONFIG_KEY!r}, but vLLM's is "
            f"{engine_args.block_size}: leave the former out"
        )
    if engine_args.enable_prefix_caching is False:
        raise ConfigurationError("Spans need prefix caching; do not switch it off")
    engine_args.enable_prefix_caching = True
    for name, path in (("scheduler_cls", parts.scheduler), ("worker_cls", parts.worker)):
        if getattr(engine_args, name) not in (None, "auto", path):
            raise ConfigurationError(f"Spans need a {name} of their own; do not set it")
        setattr(engine_args, name, path)
    if platform == "cuda":
        _ask_for_flash_attention(engine_args)
    engine_args.additional_config = {
        **engine_args.additional_config,
        CONFIG_KEY: config.to_dict(),
    }
    from minipic_backend.plugin.requests import check_request, refuse_depth

    seams.on_process_inputs(check_request, refuse_depth)
    seams.add_stat_logger(span_stat_logger)


def span_config(vllm_config: Any) -> SpanConfig:
    """The completed configuration of a running engine.

    Raises:
        ConfigurationError: it is missing, because a part of the plugin was set by hand.
    """
    values = vllm_config.additional_config
    if not isinstance(values, dict) or CONFIG_KEY not in values:
        raise ConfigurationError(
            f"A part of MiniPIC is in use, but additional_config has no {CONFIG_KEY!r}: let "
            "additional_config choose the scheduler and the worker"
        )
    return SpanConfig.from_dict(values[CONFIG_KEY])


def check_config(vllm_config: Any, kv_cache_config: Any | None = None) -> SpanConfig:
    """Checks, at start-up and in each process, that every other part is in place.

    Raises:
        ConfigurationError: half a plugin, or an option of vLLM's that excludes spans.
        UnsupportedModelError: a kind of model that spans do not work with.
    """
    seams.check_vllm_version()
    config = span_config(vllm_config)
    parts = _PARTS[_platform()]
    if vllm_config.scheduler_config.scheduler_cls != parts.scheduler:
        raise ConfigurationError(f"The span scheduler is not in place; {_BY_ITSELF}")
    if vllm_config.parallel_config.worker_cls != parts.worker:
        raise ConfigurationError(f"The span worker is not in place; {_BY_ITSELF}")
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise ConfigurationError("Spans need prefix caching, which is off for this model")
    if cache.block_size != config.block_size:
        raise ConfigurationError(
            f"Spans were laid out for blocks of {config.block_size} tokens; vLLM uses "
            f"{cache.block_size}"
        )
    for wrong, what in (
        (vllm_config.speculative_config is not None, "speculative decoding"),
        (vllm_config.parallel_config.decode_context_parallel_size > 1, "decode context parallel"),
        (vllm_config.parallel_config.prefill_context_parallel_size > 1, "prefill context parallel"),
        (cache.kv_sharing_fast_prefill, "kv_sharing_fast_prefill"),
        (cache.cache_dtype not in parts.cache_dtypes, f"a {cache.cache_dtype} KV cache"),
        (vllm_config.parallel_config.use_ubatching, "dual-batch overlap"),
        (_has_mixed_full_graphs(vllm_config), "FULL CUDA graphs of mixed batches"),
        *_connector_faults(vllm_config),
    ):
        if wrong:
            raise ConfigurationError(f"Spans do not work with {what} yet; switch it off")
    model = vllm_config.model_config
    for wrong, what in (
        (model.is_encoder_decoder, "is an encoder-decoder"),
        (model.uses_mrope, "uses multi-dimensional rotary positions (M-RoPE)"),
        (model.use_mla, "uses multi-head latent attention (MLA)"),
        (model.runner_type != "generate", f"is a {model.runner_type} model"),
    ):
        if wrong:
            raise UnsupportedModelError(f"Spans do not work with {model.model}: it {what}")
    if kv_cache_config is not None:
        _check_kv_cache(model.model, kv_cache_config)
    return config


def _platform() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise ConfigurationError(
        f"Spans run on vLLM's CPU and CUDA platforms, not on {current_platform.device_type}"
    )


def _ask_for_flash_attention(engine_args: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    wanted = AttentionBackendEnum.FLASH_ATTN
    if engine_args.attention_backend not in (None, wanted, wanted.name):
        raise ConfigurationError(
            f"Spans work on vLLM's FLASH_ATTN backend, not on {engine_args.attention_backend}: "
            "leave attention_backend out"
        )
    engine_args.attention_backend = wanted


def _has_mixed_full_graphs(vllm_config: Any) -> bool:
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.mixed_mode().name == "FULL"


def _connector_faults(vllm_config: Any) -> list[tuple[bool, str]]:
    """Keys of a cache outside the engine must be the block hashes: only they tell spans apart."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    name = transfer.kv_connector
    events = vllm_config.kv_events_config
    has_events = events is not None and events.enable_kv_cache_events
    return [
        (name not in _CONNECTORS, f"the KV connector {name}"),
        # The connector makes events of its own, whose parents are those of ordinary prompts.
        (has_events, "KV cache events of offloaded blocks"),
    ]


def _check_kv_cache(model: str, kv_cache_config: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise UnsupportedModelError(
            f"Spans need full attention in every layer; {model} has "
            f"{', '.join(sorted(kinds)) or 'none'}"
        )


def _tokenizer(engine_args: Any) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(
        engine_args.tokenizer or engine_args.model,
        tokenizer_mode=engine_args.tokenizer_mode,
        trust_remote_code=engine_args.trust_remote_code,
        revision=engine_args.tokenizer_revision,
    )


def check_layer_cache(layer: Any, model: str) -> None:
    """Refuses a KV cache that we cannot read, where a checkpoint asks for one: its layers tell.

    Raises:
        UnsupportedModelError: it does.
    """
    known = _PARTS[_platform()].cache_dtypes
    for wrong, what in (
        (layer.kv_cache_dtype not in known, f"has a {layer.kv_cache_dtype} KV cache"),
        (
            any(s.numel() > 1 for s in (layer._q_scale, layer._k_scale, layer._v_scale)),
            "has KV cache scales by head",
        ),
    ):
        if wrong:
            raise UnsupportedModelError(
                f"Spans do not work with {model}: layer {layer.layer_name} {what}"
            )
