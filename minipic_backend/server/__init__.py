"""The server's side: routes and layout for vLLM's API server (`vllm.endpoint_plugins`)."""

from __future__ import annotations

from minipic_backend.server.plugin import EndpointPlugin

__all__ = ["EndpointPlugin"]
