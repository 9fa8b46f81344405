"""Names of the options that a call may carry, in one place for every engine and integration.

`None` as a value always means: the engine's own default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from minipic_backend.errors import ConfigurationError, shown

__all__ = [
    "LAYOUT_OPTIONS",
    "REQUEST_OPTIONS",
    "SAMPLING_OPTIONS",
    "SplitOptions",
    "split_options",
]

SAMPLING_OPTIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)
"""How tokens are chosen: vLLM's `SamplingParams` fields, under vLLM's names."""

LAYOUT_OPTIONS = frozenset(
    {
        "best_last",
        "blocks",
        "budget",
        "frame",
        "late",
        "offsets",
        "primer",
        "see_markers",
        "see_primer",
        "technique",
    }
)
"""How a prompt becomes segments."""

_REQUEST_TYPES: dict[str, type] = {"cache_salt": str, "priority": int, "request_id": str}

REQUEST_OPTIONS = frozenset(_REQUEST_TYPES)
"""How the engine handles the request."""

_ALL = SAMPLING_OPTIONS | LAYOUT_OPTIONS | REQUEST_OPTIONS

# Names that other libraries use, too far from ours for a spelling match.
_OTHER_NAMES = {
    "best_of": "n",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "response_format": "structured_outputs",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
}

# The same, of what a model is made with.
_OTHER_FIELDS = {
    "api_base": "base_url",
    "model_id": "model",
    "model_name": "model",
    "model_path": "model",
    "openai_api_base": "base_url",
    "openai_api_key": "api_key",
    "repo_id": "model",
    "request_timeout": "timeout",
    "server_url": "base_url",
    "vllm_kwargs": "engine_options",
}

# What a model or an engine is made with, and no call can change.
_MAKING_OPTIONS = frozenset(
    {
        "api_key",
        "base_url",
        "context_window",
        "engine",
        "engine_options",
        "headers",
        "max_retries",
        "model",
        "on_missing_plugin",
        "timeout",
        "trim_history",
    }
)

# Those of vLLM's and ours that people look for first; all others are known to the engine alone.
_ENGINE_OPTIONS = frozenset(
    {
        "download_dir",
        "dtype",
        "enable_lora",
        "enforce_eager",
        "gpu_memory_utilization",
        "key_encoding",
        "kv_cache_gib",
        "kv_offloading_size",
        "load_format",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "quantization",
        "revision",
        "tensor_parallel_size",
        "tokenizer",
        "trust_remote_code",
    }
)


class SplitOptions(NamedTuple):
    """A call's options by who reads them; options that were None are left out."""

    sampling: dict[str, Any]
    layout: dict[str, Any]
    request: dict[str, Any]


def split_options(options: Mapping[str, Any], fields: Collection[str] = ()) -> SplitOptions:
    """Sort a call's options into sampling, layout and request.

    Args:
        options: by name.
        fields: what else may be given where these were, for messages; one is `engine_options`.

    Raises:
        ConfigurationError: a name that none of them knows, with the nearest known one; a request's
            option of a wrong type.
    """
    if unknown := [name for name in options if name not in _ALL]:
        raise ConfigurationError("; ".join(_complaint(name, fields) for name in unknown))
    given = {name: value for name, value in options.items() if value is not None}
    for name, kind in _REQUEST_TYPES.items():
        if name in given and (not isinstance(given[name], kind) or isinstance(given[name], bool)):
            raise ConfigurationError(f"{name}={shown(given[name])}: expected {kind.__name__}")
    return SplitOptions(
        *(
            {name: value for name, value in given.items() if name in names}
            for names in (SAMPLING_OPTIONS, LAYOUT_OPTIONS, REQUEST_OPTIONS)
        )
    )


def _complaint(name: str, fields: Collection[str]) -> str:
    if name in _ENGINE_OPTIONS:
        where = f"engine_options={{{name!r}: …}}" if fields else "not a call's"
        return f"Unknown option {shown(name)}: it is the engine's, {where}"
    if not fields and name in _MAKING_OPTIONS:
        return f"Unknown option {shown(name)}: it is given where the model is made, not to a call"
    known = sorted({*_ALL, *fields})
    near = _OTHER_FIELDS.get(name) if fields else None
    near = near or _OTHER_NAMES.get(name) or next(iter(get_close_matches(name, known, n=1)), None)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    engine = "; what is for vLLM's engine goes into engine_options" if fields and not near else ""
    return f"Unknown option {shown(name)}: {hint}{engine}"
