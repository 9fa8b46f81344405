"""Tools that return documents, which LangChain would print in Python's notation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool, Tool

from langchain_minipic.documents import find_documents
from langchain_minipic.messages import span_blocks
from minipic_backend import PromptError

__all__ = ["keeping_documents"]


def keeping_documents(tool: BaseTool) -> BaseTool:
    """The tool, whose results are marked blocks where they were documents: one, or a list, a
    generator or any other iterable of them. A tool that is no function, or that gives an artifact,
    is returned as it is."""
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
        result = await function(*args, **kwargs)
        if isinstance(result, AsyncIterator):
            result = [item async for item in result]
        return _marked(result)

    return acall


def _marked(result: Any) -> Any:
    result = _listed(result)
    try:
        documents = find_documents(result)
    except PromptError:  # documents and other things: not ours to sort out
        return result
    return span_blocks(documents) if documents else result


def _listed(result: Any) -> Any:
    """An iterable that begins with a document, as a list; any other result still yields all that
    it did."""
    if not isinstance(result, Iterable) or isinstance(result, str | Mapping | list | tuple):
        return result
    items = iter(result)
    first = list(itertools.islice(items, 1))
    if first and find_documents(first):
        return [*first, *items]
    return itertools.chain(first, items) if isinstance(result, Iterator) else result
