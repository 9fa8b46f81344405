"""The primer: stand-in documents at the end of the prefix.

A document that was computed with no other in front of it looks to the question like the first and
only one; ten of those confuse a model. Behind two stand-ins they do less so, at no cost per
request: the primer is part of the prefix (figures: docs/architecture.md).
"""

from __future__ import annotations

from typing import Literal

__all__ = ["AUTO_PRIMER", "primer_passages"]

# Invented places and things, no people and no years: nothing here may pass for an answer. Changing
# a character makes every cached span cold.
AUTO_PRIMER: tuple[str, str] = (
    "Ostrivel is a small market town on the upper Tamsk, a river of the Korvane plain. It has a "
    "covered bridge, an old grain hall and a paper mill, and is known for its orchards.",
    "The velmara is a stringed instrument with nine strings and a flat back, carved from a single "
    "piece of pear wood. It is plucked with the fingers and accompanies slow dances.",
)


def primer_passages(primer: Literal["auto"] | tuple[str, ...] | None) -> tuple[str, ...]:
    """The passages that a `TechniqueSettings.primer` stands for."""
    if primer is None:
        return ()
    return AUTO_PRIMER if primer == "auto" else primer
