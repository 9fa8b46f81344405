"""A LoRA adapter beside the model, as `minipic adapt` saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError, ModelNotFoundError, shown

__all__ = ["adapter_arguments", "adapter_request"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `max_lora_rank` may be."""


def adapter_arguments(path: str) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` that make room for the adapter in a folder.

    Raises:
        ModelNotFoundError: no adapter there.
        ConfigurationError: of a rank that vLLM does not serve.
    """
    try:
        rank = int(json.loads((Path(path) / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"No LoRA adapter in {shown(path)}: {error}") from error
    fitting = [one for one in _RANKS if one >= rank]
    if not fitting:
        raise ConfigurationError(
            f"The adapter in {shown(path)} has rank {rank}; vLLM serves up to {_RANKS[-1]}: "
            "train one of a lower rank, or merge it into the model"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting[0]}


def adapter_request(path: str) -> Any:
    """vLLM's request for the adapter. Its name enters the hash of every block."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(Path(path).resolve().name or "adapter", 1, path)
