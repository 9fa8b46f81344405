"""Tiny models with random weights on disk, with SmolLM2's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

__all__ = ["save_tiny"]

_SHAPE = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def save_tiny(folder: Path, tokenizer_from: str, kind: str, **settings: Any) -> str:
    """Saves a model of transformers' `kind` ("llama", "gpt2", …); returns its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **_SHAPE, **settings)
    # so that attention matters
    config.initializer_range = settings.get("initializer_range", 0.3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = Path(tokenizer_from) / name
        if source.exists():
            shutil.copy(source, folder / name)
    return str(folder)
