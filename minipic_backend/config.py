"""Options as frozen values that are passed down, never read from a global.

What is fixed for an engine (`SpanConfig`: token ids, block size, key encoding, policy) and what a
single request may choose (`SpanOptions`: frame, offsets, patches, …) cross process borders as plain
JSON, inside vLLM's `additional_config` and a request's `extra_args`. `TechniqueSettings` is what a
layout makes of a technique's name; it stays with the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.spans.patches import Patch, Place, as_patches, as_places, is_whole

__all__ = [
    "CONFIG_KEY",
    "TECHNIQUE_SETTINGS",
    "Frame",
    "KeyEncoding",
    "Offsets",
    "Policy",
    "SpanConfig",
    "SpanFrame",
    "SpanOptions",
    "Technique",
    "TechniqueSettings",
    "resolve_technique",
]

CONFIG_KEY = "minipic"
"""Key of our part in vLLM's `additional_config` and in `SamplingParams.extra_args`."""

Frame = Literal["none", "prefix", "universal"]
"""What the layout puts in front of spans."""

SpanFrame = Literal["none", "prefix"]
"""The same to an engine, for which a universal frame is a prompt's prefix."""

KeyEncoding = Literal["span_local", "unrotated"]
Offsets = Literal["compact", "padded"]
Policy = Literal["interleaved", "batched", "in_place"]
Technique = Literal[
    "primed", "block_attention", "epic", "epic_paper", "selective", "prompt_cache", "full"
]


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={shown(value)}: True or False")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={shown(value)}: choose one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """What one request chooses about its spans.

    Args:
        frame: the context that a span is computed behind: "none", or the prompt's own "prefix".
        offsets: "compact" (positions run on as if the pads of spans were not there) or "padded".
        see_markers: whether later tokens see the SSep token in front of each span.
        patches: parts of spans that this prompt computes anew (`patches.Patch`).
        places: (token index, offset) of segments that stand further on than right behind the one
            in front: reserved ranges.
        seen_prefix: how many of the prefix's tokens dependent ones see, not all; what follows, a
            primer, is there for the spans. None: all.
    """

    frame: SpanFrame = "prefix"
    offsets: Offsets = "compact"
    see_markers: bool = True
    patches: tuple[Patch, ...] = ()
    places: tuple[Place, ...] = ()
    seen_prefix: int | None = None

    def __post_init__(self) -> None:
        _check_choice("frame", self.frame, get_args(SpanFrame))
        _check_choice("offsets", self.offsets, get_args(Offsets))
        _check_bool("see_markers", self.see_markers)
        object.__setattr__(self, "patches", as_patches(self.patches))
        object.__setattr__(self, "places", as_places(self.places))
        if self.seen_prefix is not None and not is_whole(self.seen_prefix):
            raise ConfigurationError(
                f"seen_prefix={shown(self.seen_prefix)}: a number of tokens, or None"
            )

    @property
    def names_tokens(self) -> bool:
        """Whether they are of one prompt, which has spans."""
        return bool(self.patches or self.places or self.seen_prefix is not None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], base: SpanOptions | None = None) -> SpanOptions:
        """`base` (default: the defaults) with `values` laid over it; unknown keys are refused."""
        _check_keys(cls, values)
        return replace(base or cls(), **values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SpanConfig:
    """What is fixed for the life of an engine.

    Args:
        ssep: token id that starts a span when it is the first token of a block.
        pdep: token id that starts a dependent segment.
        pad: token id that fills a segment up to a block boundary.
        block_size: tokens in one KV cache block.
        key_encoding: how keys are cached: rotated by their local position ("span_local") or
            without rotation ("unrotated").
        options: what requests get that choose nothing.
        policy: who computes spans that are not cached: requests of the scheduler's own, each span
            once and in front of the first prompt that needs it ("interleaved"), all of those before
            any prompt ("batched"), or every prompt for itself ("in_place").
        hold_share: the most of the KV cache, from 0 to 1, that is kept for prompts which wait for
            their spans. Given back before anybody goes short of memory.
    """

    ssep: int
    pdep: int
    pad: int
    block_size: int
    key_encoding: KeyEncoding = "span_local"
    options: SpanOptions = SpanOptions()
    policy: Policy = "interleaved"
    hold_share: float = 0.25

    def __post_init__(self) -> None:
        _check_choice("key_encoding", self.key_encoding, get_args(KeyEncoding))
        _check_choice("policy", self.policy, get_args(Policy))
        if not isinstance(self.hold_share, int | float) or not 0 <= self.hold_share <= 1:
            raise ConfigurationError(f"hold_share={shown(self.hold_share)}: a number from 0 to 1")
        ids = (self.ssep, self.pdep, self.pad)
        if len(set(ids)) != 3 or min(ids) < 0:
            raise ConfigurationError(f"ssep, pdep and pad must be three token ids, not {ids}")
        if self.options.names_tokens:
            raise ConfigurationError(
                "patches, places and seen_prefix are of one prompt, no default"
            )
        if self.block_size < 1:
            raise ConfigurationError(f"block_size={self.block_size}: at least 1")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpanConfig:
        """The inverse of `to_dict`; unknown keys are refused."""
        _check_keys(cls, values)
        values = dict(values)
        if isinstance(values.get("options"), Mapping):
            values["options"] = SpanOptions.from_dict(values["options"])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigurationError(f"additional_config[{CONFIG_KEY!r}]: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TechniqueSettings:
    """What a technique's name stands for; every field can be overridden by itself.

    Args:
        spans: False lays documents out as ordinary text (exact attention).
        frame: see `SpanOptions`; with "universal" the prefix ends where the caller's own text
            begins: the chat template's opening and the primer, whatever the system prompt.
        primer: passages that look like documents, put at the end of the prefix.
        see_primer: the question, too, sees the primer, not the spans alone.
        best_last: ranked documents stand in the order of their ranks, the best one last, behind
            unranked ones.
        late: how many of the best-ranked documents go last, into the dependent segment.
        blocks: how many of each document's first blocks are computed anew, in context.
        budget: share of the documents' blocks, chosen by the question, that is computed anew.
        split: the first blocks are cut off the documents instead of computed twice.
        schema: modules of a `prompt_cache.SchemaPrompt` stand at their reserved positions.
    """

    spans: bool
    frame: Frame
    primer: Literal["auto"] | tuple[str, ...] | None
    late: int
    blocks: int = 0
    budget: float = 0.0
    split: bool = False
    schema: bool = False
    see_primer: bool = False
    best_last: bool = False

    @property
    def span_frame(self) -> SpanFrame:
        """What the engine computes spans behind."""
        return "none" if self.frame == "none" else "prefix"


_TECHNIQUES: dict[str, TechniqueSettings] = {
    "primed": TechniqueSettings(spans=True, frame="prefix", primer="auto", late=1, best_last=True),
    "block_attention": TechniqueSettings(spans=True, frame="none", primer=None, late=0),
    "epic": TechniqueSettings(spans=True, frame="none", primer=None, late=0, blocks=1),
    "epic_paper": TechniqueSettings(
        spans=True, frame="none", primer=None, late=0, blocks=1, split=True
    ),
    "selective": TechniqueSettings(spans=True, frame="prefix", primer="auto", late=0, budget=0.1),
    "prompt_cache": TechniqueSettings(spans=True, frame="none", primer=None, late=0, schema=True),
    "full": TechniqueSettings(spans=False, frame="none", primer=None, late=0),
}


TECHNIQUE_SETTINGS = ("frame", "primer", "see_primer", "best_last", "late", "blocks", "budget")
"""What a call may override of its technique, by name."""


def resolve_technique(technique: str, **overrides: Any) -> TechniqueSettings:
    """Settings of a technique, with the overrides that are not None laid over them.

    `primer` may be "auto", a passage, a sequence of passages, or False for none.

    Raises:
        ConfigurationError: unknown technique or value.
    """
    _check_choice("technique", technique, tuple(_TECHNIQUES))
    given = {key: value for key, value in overrides.items() if value is not None}
    if "primer" in given:
        given["primer"] = _as_primer(given["primer"])
    settings = replace(_TECHNIQUES[technique], **given)
    _check_choice("frame", settings.frame, get_args(Frame))
    _check_bool("see_primer", settings.see_primer)
    _check_bool("best_last", settings.best_last)
    for name in ("late", "blocks"):
        value = getattr(settings, name)
        if not is_whole(value):
            raise ConfigurationError(f"{name}={shown(value)}: a whole number from 0")
    budget = settings.budget
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 <= budget <= 1:
        raise ConfigurationError(f"budget={shown(budget)}: a share from 0 to 1")
    if budget and settings.blocks:
        own = [name for name in ("budget", "blocks") if name not in given]
        raise ConfigurationError(
            "budget and blocks exclude each other: choose one"
            + "".join(f" ({technique} has {name} by itself; {name}=0 turns it off)" for name in own)
        )
    return settings


def _as_primer(primer: Any) -> Literal["auto"] | tuple[str, ...] | None:
    if primer is False:
        return None
    if primer == "auto" or primer is True:
        return "auto"
    passages = (primer,) if isinstance(primer, str) else primer
    passages = tuple(passages) if isinstance(passages, Iterable) else (passages,)
    if not all(isinstance(passage, str) for passage in passages):
        raise ConfigurationError(
            f"primer={shown(primer)}: 'auto', False, a passage, or a sequence of passages"
        )
    return passages or None


def _check_keys(cls: type, values: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(values) - known, key=str):
        raise ConfigurationError(
            f"Unknown {CONFIG_KEY} option {', '.join(map(shown, unknown))}; known: "
            f"{', '.join(sorted(known))}"
        )
