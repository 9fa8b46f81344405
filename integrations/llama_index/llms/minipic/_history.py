"""What is left out of a chat that outgrows the context.

A turn is a user's message and all that answers it. Turns go, the oldest first and whole, four at a
time, so that what is kept stays a cached prefix for some turns. The system messages stay, and so
does the last turn.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole

__all__ = ["history_of", "trimmed", "trimmed_transcript"]

_STEP = 4
_TURN = re.compile(r"^(?=user: )", re.MULTILINE)
_SYSTEM = (MessageRole.SYSTEM, MessageRole.DEVELOPER)


def trimmed(
    messages: Sequence[ChatMessage], fits: Callable[[Sequence[ChatMessage]], bool]
) -> list[ChatMessage]:
    """The messages less as many old turns as it takes until they fit; if they never do, less all
    but the last."""
    head, turns = _turns(messages)

    def keep(dropped: int) -> list[ChatMessage]:
        if not dropped:
            return list(messages)
        return [*head, *(message for turn in turns[dropped:] for message in turn)]

    return keep(_fewest(len(turns), lambda dropped: fits(keep(dropped))))


def trimmed_transcript(text: str, fits: Callable[[str], bool]) -> str:
    """The same for a chat that LlamaIndex wrote into one text, to condense it."""
    turns = [turn for turn in _TURN.split(text) if turn]
    dropped = _fewest(len(turns), lambda dropped: fits("".join(turns[dropped:])))
    return "".join(turns[dropped:])


def _fewest(num_turns: int, fits: Callable[[int], bool]) -> int:
    """How many turns to leave out."""
    last = max(num_turns - 1, 0)
    if not last or fits(0):
        return 0
    choices: list[int] = [*range(_STEP, last, _STEP), last]
    place = bisect_left(choices, True, key=fits)
    return choices[min(place, len(choices) - 1)]


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
