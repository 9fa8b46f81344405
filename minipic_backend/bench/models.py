"""Models to measure with: a real one by name, or a shape with random weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError, shown

__all__ = ["SHAPES", "model_arguments"]

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        **_LLAMA,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
"""Shapes with random weights: `shape:llama-3-8b`."""


def model_arguments(model: str) -> dict[str, Any]:
    """vLLM's arguments for a model, or for `shape:NAME` (random weights, no tokenizer).

    Raises:
        ConfigurationError: an unknown shape.
    """
    if not model.startswith("shape:"):
        return {"model": model}
    name = model.removeprefix("shape:")
    if name not in SHAPES:
        raise ConfigurationError(f"Unknown shape {shown(name)}; known: {', '.join(SHAPES)}")
    folder = Path(tempfile.mkdtemp(prefix="minipic-shape-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
