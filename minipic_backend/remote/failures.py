"""What went wrong, as our errors: from exceptions of httpx and from a server's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx

from minipic_backend.errors import (
    ConfigurationError,
    EngineError,
    MalformedSpansError,
    MiniPICError,
    PromptError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from minipic_backend.remote.retries import RETRIED_STATUS
from minipic_backend.sampling import SAMPLING_OPTIONS

__all__ = ["as_ours", "refusal"]

_TOKEN_INDEX = re.compile(r" \(token index (\d+)\)$")


def as_ours(error: Exception, base_url: str) -> MiniPICError:
    """`error` as one of our tree; the cause stays chained."""
    if isinstance(error, MiniPICError):
        return error
    ours = _as_ours(error, base_url)
    ours.__cause__ = error
    return ours


def _as_ours(error: Exception, base_url: str) -> MiniPICError:
    if isinstance(error, httpx.HTTPStatusError):
        response = error.response
        return refusal(response.status_code, _message(response.text), base_url)
    if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
        return ServerUnreachableError(
            f"No server answers at {base_url} ({_reason(error)}): is it running, and is base_url "
            "right? `minipic doctor --base-url` checks it"
        )
    if isinstance(error, httpx.TimeoutException):
        return ServerTimeoutError(
            f"The server at {base_url} was silent for longer than timeout= allows"
        )
    if isinstance(error, httpx.TransportError):
        return ServerUnreachableError(
            f"The connection to {base_url} was lost before the answer ended ({_reason(error)})"
        )
    if isinstance(error, httpx.InvalidURL | ValueError):
        return EngineError(f"The server at {base_url} sent what is no answer: {_reason(error)}")
    return EngineError(f"Talking to {base_url} failed: {_reason(error)}")


def refusal(status: int, error: Mapping[str, Any], base_url: str) -> MiniPICError:
    """The error that stands for a server's own: `message`, `param`."""
    message = str(error.get("message") or f"HTTP status {status}")
    if status in (401, 403):
        return ConfigurationError(f"The server at {base_url} refuses the api_key: {message}")
    if status == 404:
        return ConfigurationError(f"The server at {base_url} does not have it: {message}")
    if status in RETRIED_STATUS:
        return EngineError(f"The server at {base_url} is overloaded (HTTP {status}): {message}")
    if status >= 500:
        return EngineError(f"The server at {base_url} failed (HTTP {status}): {message}")
    if index := _TOKEN_INDEX.search(message):
        return MalformedSpansError(message[: index.start()], int(index[1]))
    if error.get("param") in SAMPLING_OPTIONS:
        return ConfigurationError(message)
    return PromptError(message)


def _message(body: str) -> Mapping[str, Any]:
    try:
        found = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": " ".join(body.split())[:500]}
    return found if isinstance(found, Mapping) else {"message": str(found)}


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
