"""What a call chose about its layout, laid over what its engine or server does by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipic_backend.config import (
    TECHNIQUE_SETTINGS,
    SpanOptions,
    TechniqueSettings,
    resolve_technique,
)
from minipic_backend.errors import ConfigurationError
from minipic_backend.sampling import split_options

__all__ = ["LAYOUT_DEFAULTS", "check_choice", "check_warmable", "choose_layout"]

LAYOUT_DEFAULTS: Mapping[str, Any] = {
    "technique": "primed",
    **dict.fromkeys(TECHNIQUE_SETTINGS),
    "offsets": "compact",
    "see_markers": True,
}
"""Where nobody says anything. None: the technique's own."""


def choose_layout(
    defaults: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[TechniqueSettings, SpanOptions]:
    """Technique settings and span options of a call.

    A technique named by the call brings its own frame, primer, late documents and the like.

    Args:
        defaults: a value for each key of `LAYOUT_DEFAULTS`.
        chosen: some of these keys, never with None.

    Raises:
        ConfigurationError: an unknown value.
    """
    values = dict(defaults)
    if chosen.get("technique") not in (None, values["technique"]):
        values.update(dict.fromkeys(TECHNIQUE_SETTINGS))
    values.update(chosen)
    own = {name: values.get(name) for name in TECHNIQUE_SETTINGS}
    settings = resolve_technique(values["technique"], **own)
    return settings, SpanOptions(settings.span_frame, values["offsets"], values["see_markers"])


def check_choice(options: Mapping[str, Any]) -> None:
    """Refuses layout options that no engine would take, whatever it does by default.

    Args:
        options: by name, those of other kinds too.

    Raises:
        ConfigurationError: an unknown value, or two that exclude each other.
    """
    choose_layout(LAYOUT_DEFAULTS, split_options(options).layout)


def check_warmable(settings: TechniqueSettings) -> None:
    """Refuses to compute documents ahead of time where no prompt would read them.

    Raises:
        ConfigurationError: documents are cut up, or are no spans at all.
    """
    if settings.split and settings.blocks:
        raise ConfigurationError(
            "With technique 'epic_paper' each document's head comes first and is new in every "
            "prompt, so that nothing behind it is read from the cache: there is nothing to warm. "
            "Technique 'epic' computes the same heads anew and keeps whole documents"
        )
    if settings.schema:
        raise ConfigurationError(
            "With technique 'prompt_cache' spans are the modules of a schema, not documents: "
            "generate one prompt that imports them instead"
        )
