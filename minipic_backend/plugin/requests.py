"""Refuses a request that spans forbid, in the process that takes it in.

In the engine's own it would be too late: there an error has no way back to the caller, who would
see a failure of the server.
"""

from __future__ import annotations

from typing import Any

from minipic_backend.config import CONFIG_KEY
from minipic_backend.errors import PromptError

__all__ = ["check_request"]


def check_request(vllm_config: Any, request: Any) -> None:
    """Checks vLLM's `EngineCoreRequest`; does nothing where spans are off.

    Raises:
        MalformedSpansError: markers or pads at the wrong place.
        ConfigurationError: unknown span options.
        PromptError: spans together with something that they do not go with.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return
    if request.sampling_params is None:
        return
    from minipic_backend.plugin.enable import span_config
    from minipic_backend.plugin.hasher import request_segments

    table = request_segments(request, span_config(vllm_config))
    if table is not None and request.resumable:
        raise PromptError("Spans do not go together with a prompt that is streamed in")
