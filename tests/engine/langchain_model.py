"""The one embedded engine that the tests of the LangChain classes share."""

from __future__ import annotations

from typing import Any

from minipic_backend.models import ensure_smollm2

__all__ = ["model_params"]

_ENGINE_OPTIONS = {"max_model_len": 2048, "kv_cache_gib": 0.25}


def model_params(**further: Any) -> dict[str, Any]:
    """Arguments of `ChatMiniPIC` and `MiniPIC`: the same ones give the same engine."""
    path = str(ensure_smollm2(progress=False))
    return {"model": path, "engine_options": _ENGINE_OPTIONS, "temperature": 0, **further}
