"""Which of a tokenizer's tokens serve as markers: special ones that its model never uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minipic_backend.errors import MarkerError, shown
from minipic_backend.layout.tokenizer import AddedToken, Tokenizer, chat_templates, tokenizer_name

__all__ = ["Markers", "choose_markers"]

_RESERVED = re.compile(
    r"reserved|unused|place.?holder|extra|dummy|^<SPECIAL_\d+>$|^\[control_\d+\]$", re.IGNORECASE
)
# Best first. Behind the reserved ones come tokens that code models saw in pre-training only, then
# those that only a model with eyes uses (Qwen's text models carry them, untrained), then infilling.
_CODE = re.compile(
    r"repo_?name|file_?sep|file_?name|gh_stars|issue|commit|jupyter|empty_output", re.IGNORECASE
)
_GROUNDING = re.compile(r"^<\|(object_ref|box|quad)_(start|end)\|>$")
_INFILLING = re.compile(r"fim[_-]|^<(PRE|SUF|MID)>$", re.IGNORECASE)
_PREFERENCE = (_RESERVED, _CODE, _GROUNDING, _INFILLING)

_NEVER = re.compile(r"image|img|audio|video|vision|speech|think|reason|tool|python", re.IGNORECASE)
_SEES = re.compile(r"image|video|vision", re.IGNORECASE)

_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


@dataclass(frozen=True, slots=True)
class Markers:
    """Token ids: `ssep` starts a span, `pdep` a dependent segment, `pad` fills a block."""

    ssep: int
    pdep: int
    pad: int


def choose_markers(
    tokenizer: Tokenizer,
    *,
    configured: Sequence[str | int] | Markers | None = None,
    extra_excluded_ids: Iterable[int] = (),
) -> Markers:
    """The three marker tokens of a tokenizer; the same for the same tokenizer always.

    Args:
        tokenizer: where to look.
        configured: the caller's own choice, as token strings or ids: SSep, PDep, pad.
        extra_excluded_ids: further ids in use, such as the ends that a generation config names.

    Raises:
        MarkerError: fewer than three tokens are free, or the configured ones will not do.
    """
    uses = _uses(tokenizer, extra_excluded_ids)
    if configured is not None:
        return _check_configured(tokenizer, configured, uses)
    sees = any(_SEES.search(template) for template in chat_templates(tokenizer))
    ranked: list[tuple[int, int, str]] = []
    added = _added_tokens(tokenizer)
    for token_id, token in added.items():
        rank = _rank(token, grounding_in_use=sees)
        if rank is not None and token_id not in uses:
            ranked.append((rank, token_id, token.content))
    ranked.sort()
    if len(ranked) < 3:
        found = ", ".join(content for _, _, content in ranked) or "none"
        raise MarkerError(
            f"Spans need three special tokens that the model never uses, and the tokenizer "
            f"{tokenizer_name(tokenizer)} has {len(ranked)} ({found}). Looked for reserved, "
            f"unused, placeholder, extra, repository and infilling tokens among its {len(added)} "
            "added tokens; left out those that the chat template or the tokenizer itself uses. "
            "Name three yourself, as token strings or ids: markers=('<a>', '<b>', '<c>')."
        )
    return Markers(*(token_id for _, token_id, _ in ranked[:3]))


def _rank(token: AddedToken, *, grounding_in_use: bool) -> int | None:
    """Place in the order of preference; None: not to be taken."""
    if _NEVER.search(token.content):
        return None
    for rank, names in enumerate(_PREFERENCE):
        if names.search(token.content):
            if names is _GROUNDING and grounding_in_use:
                return None
            # Gemma's <unused0> and its like are not flagged special.
            return rank if token.special or names is _RESERVED else None
    return None


def _uses(tokenizer: Tokenizer, extra_excluded_ids: Iterable[int]) -> dict[int, str]:
    """Ids that are taken, each with what for."""
    uses = dict.fromkeys(extra_excluded_ids, "ends the generation")
    templates = chat_templates(tokenizer)
    named = {
        text: name
        for name, text in (getattr(tokenizer, "special_tokens_map", None) or {}).items()
        if isinstance(text, str)
    }
    for token_id, token in _added_tokens(tokenizer).items():
        if token.content in named:
            uses[token_id] = f"is the {named[token.content]}"
        elif any(token.content in template for template in templates):
            uses[token_id] = "occurs in the chat template"
    for role in _ROLES:
        token_id_of_role = getattr(tokenizer, f"{role}_token_id", None)
        if isinstance(token_id_of_role, int):
            uses[token_id_of_role] = f"is the {role}_token"
    return uses


def _check_configured(
    tokenizer: Tokenizer, configured: Sequence[str | int] | Markers, uses: dict[int, str]
) -> Markers:
    if isinstance(configured, Markers):
        configured = (configured.ssep, configured.pdep, configured.pad)
    name = tokenizer_name(tokenizer)
    if isinstance(configured, str) or len(configured) != 3:
        raise MarkerError(f"markers={shown(configured)}: three tokens (SSep, PDep, pad), please")
    vocab = dict(tokenizer.get_vocab())
    vocab |= {token.content: token_id for token_id, token in _added_tokens(tokenizer).items()}
    known_ids = set(vocab.values())
    ids: list[int] = []
    for token in configured:
        token_id = vocab.get(token) if isinstance(token, str) else token
        if token_id is None or token_id not in known_ids:
            raise MarkerError(
                f"markers={shown(configured)}: the tokenizer {name} has no token {shown(token)}"
            )
        if token_id in uses:
            raise MarkerError(
                f"markers={shown(configured)}: {shown(token)} {uses[token_id]} of {name}"
            )
        ids.append(token_id)
    if len(set(ids)) != 3:
        raise MarkerError(f"markers={shown(configured)}: three different tokens, please")
    return Markers(*ids)


def _added_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    return dict(getattr(tokenizer, "added_tokens_decoder", None) or {})
