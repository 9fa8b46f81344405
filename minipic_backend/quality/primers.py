"""Primers under comparison: what `primer=NAME` stands for in a technique of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minipic_backend.layout.primer import own_primer
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.passages import Passage

__all__ = ["primer_choices"]

_PLAIN = (
    "Ostrivel is a small market town on the upper Tamsk, a river of the Korvane plain. It has a "
    "covered bridge, an old grain hall and a paper mill, and is known for its orchards.",
    "The velmara is a stringed instrument with nine strings and a flat back, carved from a single "
    "piece of pear wood. It is plucked with the fingers and accompanies slow dances.",
)


def primer_choices(
    passages: Sequence[Passage], show: Callable[[Passage], str]
) -> dict[str, Callable[[], Any]]:
    """Primers by name.

    - none.
    - plain: two short passages without titles, people or years; titled: the same under titles.
    - copyN: N invented passages in the user's own document form.
    - ownN: N passages of the user's, of middle length.
    - long: one invented passage of some 300 tokens, in the user's document form.

    Args:
        passages: the user's.
        show: a passage in the user's document form.
    """
    choices: dict[str, Callable[[], Any]] = {
        "none": lambda: False,
        "plain": lambda: _PLAIN,
        "titled": lambda: tuple(show(_titled(text)) for text in _PLAIN),
        "long": lambda: (show(_long(12)),),
    }
    for number in (1, 2, 4, 8):
        choices[f"copy{number}"] = partial(_copied, number, show)
        choices[f"own{number}"] = partial(_own, number, passages, show)
    return choices


def _copied(number: int, show: Callable[[Passage], str]) -> tuple[str, ...]:
    return tuple(show(passage) for passage in _invented(number))


def _own(
    number: int, passages: Sequence[Passage], show: Callable[[Passage], str]
) -> tuple[str, ...]:
    return own_primer(map(show, passages), number)


def _titled(text: str) -> Passage:
    """ "Ostrivel is a town …", "The velmara is …": the subject is what stands before "is"."""
    subject = text.partition(" is ")[0].removeprefix("The ")
    return Passage(subject[:1].upper() + subject[1:], text)


def _long(number: int) -> Passage:
    return Passage("A survey of the region", " ".join(p.text for p in _invented(number)))


def _invented(number: int) -> list[Passage]:
    return invented_passages(number, seed=7)
