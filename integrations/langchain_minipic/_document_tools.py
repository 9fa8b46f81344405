"""Tools that return documents, which LangChain would print in Python's notation."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool, Tool

from langchain_minipic.documents import find_documents
from langchain_minipic.messages import span_blocks
from minipic_backend import PromptError

__all__ = ["keeping_documents"]


def keeping_documents(tool: BaseTool) -> BaseTool:
    """The tool, whose results are marked blocks where they were documents. One that is no function,
    or that gives an artifact, is returned as it is."""
    if not isinstance(tool, StructuredTool | Tool) or tool.response_format != "content":
        return tool
    changes = {"func": _call(tool.func), "coroutine": _acall(tool.coroutine)}
    return tool.model_copy(update=changes)


def _call(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if function is None:
        return None

    @functools.wraps(function)  # LangChain looks at signature and types
    def call(*args: Any, **kwargs: Any) -> Any:
        return _marked(function(*args, **kwargs))

    return call


def _acall(
    function: Callable[..., Awaitable[Any]] | None,
) -> Callable[..., Awaitable[Any]] | None:
    if function is None:
        return None

    @functools.wraps(function)
    async def acall(*args: Any, **kwargs: Any) -> Any:
        return _marked(await function(*args, **kwargs))

    return acall


def _marked(result: Any) -> Any:
    try:
        documents = find_documents(result)
    except PromptError:  # documents and other things: not ours to sort out
        return result
    return span_blocks(documents) if documents else result
