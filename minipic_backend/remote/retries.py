"""When a request is sent again, and how long to wait before."""

from __future__ import annotations

import random
from dataclasses import dataclass

import httpx

__all__ = ["RETRIED_STATUS", "Retries", "may_retry", "retry_after_s"]

RETRIED_STATUS = frozenset({429, 503})

_RETRIED_ERRORS = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    # A kept connection that the server had closed meanwhile.
    httpx.RemoteProtocolError,
)


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential back-off with jitter.

    Args:
        max_retries: sendings after the first.
        first_s: seconds before the first of them, doubled each time.
        longest_s: the most to wait, whatever the server asks for.
    """

    max_retries: int = 2
    first_s: float = 0.5
    longest_s: float = 30.0

    def delay_s(self, attempt: int, asked_s: float | None = None) -> float:
        """Seconds to wait before sending number `attempt` + 1, counted from 0.

        Args:
            attempt: the one that failed.
            asked_s: what the server's `Retry-After` says, if anything.
        """
        backoff: float = self.first_s * 2.0**attempt
        wait = max(backoff * random.uniform(0.75, 1.25), asked_s or 0.0)
        return min(wait, self.longest_s)


def may_retry(error: httpx.HTTPError) -> bool:
    """Whether the same request may succeed when it is sent again.

    A server that is silent is not among them: it may be at work on the first.
    """
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in RETRIED_STATUS
    return isinstance(error, _RETRIED_ERRORS)


def retry_after_s(error: httpx.HTTPError) -> float | None:
    """Seconds that `Retry-After` asks for; None where it asks for nothing, or names a date."""
    if not isinstance(error, httpx.HTTPStatusError):
        return None
    try:
        return max(0.0, float(error.response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
