"""Techniques under comparison, as one writes them: `primed:late=2,primer=copy2,digest=titles`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.sampling import LAYOUT_OPTIONS

__all__ = ["PROMPT_OPTIONS", "TechniqueSpec", "parse_technique"]

PROMPT_OPTIONS: dict[str, tuple[str, ...]] = {
    "digest": ("none", "titles", "quotes"),
    "rank": ("given", "oracle", "wrong", "answer"),
    "order": ("given", "best_first", "best_last"),
    "repeat": (),
}
"""What the benchmark does to a prompt before an engine sees it; empty: a number."""


@dataclass(frozen=True, slots=True)
class TechniqueSpec:
    """One technique with its options.

    Args:
        label: as it was written.
        options: for the engine: `technique` and what overrides it.
        prompt: for the benchmark: see `PROMPT_OPTIONS`.
    """

    label: str
    options: Mapping[str, Any]
    prompt: Mapping[str, Any] = field(default_factory=dict)

    @property
    def late(self) -> int:
        return int(self.options.get("late") or 0)


def parse_technique(
    text: str, primers: Mapping[str, Callable[[], Any]] | None = None
) -> TechniqueSpec:
    """A technique from `NAME` or `NAME:key=value,key=value`.

    Args:
        text: as a user writes it. Values: numbers, true, false, or words.
        primers: what the words of `primer=` stand for.

    Raises:
        ConfigurationError: an unknown key or value. Values of the engine's own options are
            checked by the engine.
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, Any] = {"technique": name}
    prompt: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, word = pair.partition("=")
        if not equals:
            raise ConfigurationError(
                f"Technique {shown(text)}: {shown(pair)} is not of the form key=value"
            )
        value = _value(word)
        if key in PROMPT_OPTIONS:
            choices = PROMPT_OPTIONS[key]
            if (value not in choices) if choices else not (isinstance(value, int) and value > 0):
                known = ", ".join(choices) or "a number from 1"
                raise ConfigurationError(f"Technique {shown(text)}: {key} is one of: {known}")
            prompt[key] = value
        elif key == "primer" and isinstance(value, str) and primers and value != "auto":
            if value not in primers:
                known = ", ".join(("auto", *primers))
                raise ConfigurationError(f"Technique {shown(text)}: primer is one of: {known}")
            options[key] = primers[value]()
        elif key in LAYOUT_OPTIONS and key != "technique":
            options[key] = value
        else:
            known = ", ".join(sorted({*LAYOUT_OPTIONS, *PROMPT_OPTIONS} - {"technique"}))
            raise ConfigurationError(
                f"Technique {shown(text)}: no option {shown(key)}; known: {known}"
            )
    return TechniqueSpec(text.strip(), options, prompt)


def _value(word: str) -> Any:
    if word.isdecimal():
        return int(word)
    if word.replace(".", "", 1).isdecimal():
        return float(word)
    return {"true": True, "false": False}.get(word.casefold(), word)
