"""What the model can do, told without starting the engine before it has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import LLMMetadata
from pydantic import PrivateAttr

__all__ = ["EngineMetadata"]


class EngineMetadata(LLMMetadata):
    """Metadata whose `context_window` is looked up when it is first read.

    LlamaIndex reads the other fields inside of event loops, which must not wait for an engine to
    load a model.
    """

    _find_window: Callable[[], int] = PrivateAttr()

    @classmethod
    def of(cls, find_window: Callable[[], int], **fields: Any) -> EngineMetadata:
        """Metadata with `fields`; `find_window` gives the context's tokens."""
        metadata = cls(**fields)
        metadata._find_window = find_window
        del metadata.__dict__["context_window"]
        return metadata

    def __getattr__(self, name: str) -> Any:
        if name == "context_window":
            window = self.__dict__[name] = self._find_window()
            return window
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides it from mypy

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """As pydantic's, with the context window."""
        _ = self.context_window
        return super().model_dump(**kwargs)
