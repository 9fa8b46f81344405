"""What is left out of a chat that outgrows the context.

A turn is a user's message and all that answers it. Turns go, the oldest first and whole, four at a
time, so that what is kept stays a cached prefix for some turns. The system messages stay, and so
does the last turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole

__all__ = ["history_of", "trimmed"]

_STEP = 4
_SYSTEM = (MessageRole.SYSTEM, MessageRole.DEVELOPER)


def trimmed(
    messages: Sequence[ChatMessage], fits: Callable[[Sequence[ChatMessage]], bool]
) -> list[ChatMessage]:
    """The messages less as many old turns as it takes until they fit; if they never do, less all
    but the last."""
    head, turns = _turns(messages)

    def keep(dropped: int) -> list[ChatMessage]:
        return [*head, *(message for turn in turns[dropped:] for message in turn)]

    last = max(len(turns) - 1, 0)
    if not last or fits(messages):
        return list(messages)
    choices = [*range(_STEP, last, _STEP), last]
    return keep(
        choices[min(bisect_left(choices, True, key=lambda n: fits(keep(n))), len(choices) - 1)]
    )


def history_of(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages that may be left out."""
    _, turns = _turns(messages)
    return [message for turn in turns[:-1] for message in turn]


def _turns(
    messages: Sequence[ChatMessage],
) -> tuple[list[ChatMessage], list[list[ChatMessage]]]:
    """System messages, and the turns of the rest."""
    head = [message for message in messages if message.role in _SYSTEM]
    turns: list[list[ChatMessage]] = []
    for message in messages:
        if message.role in _SYSTEM:
            continue
        if message.role == MessageRole.USER or not turns:
            turns.append([])
        turns[-1].append(message)
    return head, turns
