"""Models to measure with: a real one by name, or a shape with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.models import resolve_model
from minipic_backend.models.tokenizer import load_tokenizer

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


@contextmanager
def model_arguments(model: str, tokenizer: str | None = None) -> Iterator[dict[str, Any]]:
    """vLLM's arguments for a model, or for `shape:NAME` (random weights), whose folder is
    temporary and goes at the end.

    Args:
        model: as it is named.
        tokenizer: of a shape: a folder or a hub name. The shape's vocabulary grows where this has
            more tokens. None: no tokenizer.

    Raises:
        ConfigurationError: an unknown shape.
        ModelNotFoundError: no such tokenizer.
    """
    if not model.startswith("shape:"):
        yield {"model": model}
        return
    name = model.removeprefix("shape:")
    if name not in SHAPES:
        raise ConfigurationError(f"Unknown shape {shown(name)}; known: {', '.join(SHAPES)}")
    config = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="minipic-shape-") as folder:
        arguments: dict[str, Any] = {"model": folder, "load_format": "dummy"}
        if tokenizer is None:
            arguments["skip_tokenizer_init"] = True
        else:
            size = _copy(tokenizer, Path(folder))
            config = {**config, "vocab_size": max(config["vocab_size"], size)}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield arguments


def _copy(tokenizer: str, folder: Path) -> int:
    """Writes a tokenizer into a folder; the number of its tokens."""
    loaded = load_tokenizer(resolve_model(tokenizer))
    loaded.save_pretrained(folder)
    return len(loaded)
