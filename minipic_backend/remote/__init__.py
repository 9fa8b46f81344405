"""A vLLM server as an engine: layout here, generation there. Imports neither torch nor vLLM."""

from __future__ import annotations

from minipic_backend.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
