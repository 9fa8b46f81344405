"""MiniPIC: retrieved documents become spans whose KV cache vLLM reuses at any position.

    from minipic_backend import Engine, Prompt, Span, Text

Importing this package imports neither torch nor vLLM; building an `Engine` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minipic_backend.errors import (
    AnswerError,
    ConfigurationError,
    ContextWindowError,
    EngineClosedError,
    EngineError,
    EngineStartError,
    MalformedSpansError,
    MarkerError,
    MiniPICError,
    ModelNotFoundError,
    PluginMissingError,
    PromptError,
    RequestAbortedError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnsupportedModelError,
)
from minipic_backend.layout.ranking import rank_spans
from minipic_backend.prompt import Message, Prompt, Span, Text
from minipic_backend.protocol import EngineProtocol
from minipic_backend.quality.compare import Comparison, TechniqueAnswer
from minipic_backend.results import (
    Chunk,
    Completion,
    Explanation,
    Result,
    Timing,
    Usage,
    WarmReport,
)

if TYPE_CHECKING:
    from minipic_backend.engines.embedded import Engine
    from minipic_backend.remote import RemoteEngine

__version__ = "0.1.0"

__all__ = [
    "AnswerError",
    "Chunk",
    "Comparison",
    "Completion",
    "ConfigurationError",
    "ContextWindowError",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "EngineProtocol",
    "EngineStartError",
    "Explanation",
    "MalformedSpansError",
    "MarkerError",
    "Message",
    "MiniPICError",
    "ModelNotFoundError",
    "PluginMissingError",
    "Prompt",
    "PromptError",
    "RemoteEngine",
    "RequestAbortedError",
    "Result",
    "ServerTimeoutError",
    "ServerUnreachableError",
    "Span",
    "TechniqueAnswer",
    "Text",
    "Timing",
    "UnsupportedModelError",
    "Usage",
    "WarmReport",
    "__version__",
    "rank_spans",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":  # imported late: it pulls in vLLM
        from minipic_backend.engines.embedded import Engine

        return Engine
    if name == "RemoteEngine":  # pulls in httpx
        from minipic_backend.remote import RemoteEngine

        return RemoteEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
