"""A stand-in for tokenizer, chat template and layout, for the fake engine alone.

It keeps the shape of the real thing (prefix, spans, dependent text, markers, pads to the block
border), not its tokens: a token here is a word with the whitespace before it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from minipic_backend.chat import close_texts, document_core
from minipic_backend.choices import check_warmable
from minipic_backend.config import (
    TECHNIQUE_SETTINGS,
    SpanOptions,
    TechniqueSettings,
    resolve_technique,
)
from minipic_backend.errors import PromptError
from minipic_backend.prompt import Message, Prompt, Span, Text
from minipic_backend.sampling import split_options

__all__ = ["FakeLayout", "FakeSegment", "split_tokens", "token_id"]

_TOKEN = re.compile(r"\s*\S+|\s+")
_PRIMER = ("Passage one of the fake primer.", "Passage two of the fake primer.")


def split_tokens(text: str) -> list[str]:
    """Tokens of `text`; joined, they give it back."""
    return _TOKEN.findall(text)


def token_id(token: str) -> int:
    """A stable id from 3 up; 0, 1 and 2 stand for the markers and the pad."""
    return 3 + crc32(token.encode("utf-8", "surrogatepass")) % 100_000


@dataclass(frozen=True)
class FakeSegment:
    """`kind`: prefix, span or dependent. `key`: what the fake cache knows it by,
    None where nothing is kept."""

    kind: str
    label: str
    text: str
    num_pads: int
    key: Hashable | None

    @property
    def token_ids(self) -> list[int]:
        marker = {"prefix": [], "span": [0], "dependent": [1]}[self.kind]
        return marker + [token_id(token) for token in split_tokens(self.text)] + [2] * self.num_pads

    @property
    def num_tokens(self) -> int:
        """Marker and pads included."""
        return len(self.token_ids)


class FakeLayout:
    """Lays prompts out with an engine's default technique, frame, primer and late documents."""

    def __init__(self, block_size: int, **defaults: Any) -> None:
        self._block_size = block_size
        self._defaults = defaults
        self._last_prefix: dict[str, str] = {}

    def segments(self, prompt: Prompt, options: Mapping[str, Any]) -> list[FakeSegment]:
        """Segments of `prompt`, in order."""
        settings, salt = self._settings(options)
        return _lay_out(prompt, settings, self._block_size, salt)

    def remember(self, segments: Sequence[FakeSegment], options: Mapping[str, Any]) -> None:
        """The prefix that documents are warmed behind where nothing else is said."""
        if segments[0].kind == "prefix" and len(segments) > 1:
            settings, _ = self._settings(options)
            self._last_prefix[settings.frame] = segments[0].text

    def spans(
        self, texts: Sequence[str], prompt: Prompt | None, options: Mapping[str, Any]
    ) -> list[FakeSegment]:
        """Spans to warm."""
        settings, salt = self._settings(options)
        if not settings.spans:
            return []
        check_warmable(settings)
        frame = None if settings.frame == "none" else self._frame(prompt, settings, salt)
        return [_span(text, None, self._block_size, frame, salt) for text in texts]

    def _frame(self, prompt: Prompt | None, settings: TechniqueSettings, salt: str | None) -> str:
        """What documents are computed behind: the prefix of `prompt`, or of the last prompt."""
        if prompt is None:
            if settings.frame in self._last_prefix:
                return self._last_prefix[settings.frame]
            if settings.frame != "universal":
                raise PromptError("This engine has met no prefix yet: pass prompt=")
            prompt = Prompt.chat([Message("system", ""), Message("user", Span(""))])
        if not prompt.spans:
            raise PromptError("This prompt has no documents: put a Span where they will stand")
        head = _lay_out(prompt, replace(settings, late=0), self._block_size, salt)[0]
        return head.text if head.kind == "prefix" else ""

    def _settings(self, options: Mapping[str, Any]) -> tuple[TechniqueSettings, str | None]:
        _, layout, request = split_options(options)
        chosen = {**self._defaults, **layout}
        if chosen["technique"] != self._defaults["technique"]:
            # Another technique brings its own frame, primer and late documents.
            chosen = layout
        settings = resolve_technique(
            chosen["technique"], **{name: chosen.get(name) for name in TECHNIQUE_SETTINGS}
        )
        SpanOptions.from_dict({k: v for k, v in chosen.items() if k in ("offsets", "see_markers")})
        return settings, request.get("cache_salt")


def _lay_out(
    prompt: Prompt, settings: TechniqueSettings, block_size: int, salt: str | None
) -> list[FakeSegment]:
    """Segments of `prompt`, in order."""
    pieces = list(_pieces(prompt))
    ranked = sorted(
        (piece for piece in pieces if isinstance(piece, Span) and piece.rank is not None),
        key=lambda span: span.rank or 0,
    )
    late = ranked[: settings.late] if settings.spans else []
    if settings.spans and settings.best_last:
        pieces = _best_last(pieces)
    spans = [p for p in pieces if isinstance(p, Span) and not any(p is one for one in late)]
    if not settings.spans or not spans:
        return [FakeSegment("prefix", "prompt", "".join(p.text for p in pieces), 0, None)]

    segments: list[FakeSegment] = []
    primer = _PRIMER if settings.primer == "auto" else settings.primer or ()
    prefix, buffer = "", ""
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if isinstance(piece, Text):
            # What separates documents belongs to none of them, late or not.
            buffer += piece.text.lstrip() if isinstance(before, Span) else piece.text
        elif any(piece is one for one in late):
            continue
        else:
            if not segments:
                opening = buffer
                if settings.frame == "universal":
                    opening = f"<{prompt.messages[0].role}>\n" if prompt.is_chat else ""
                prefix = "\n\n".join([opening, *primer])
                if prefix:
                    key = ("prefix", salt, prefix)
                    segments.append(_padded("prefix", "prefix", prefix, block_size, key))
                rest = buffer.removeprefix(opening) if opening != buffer else ""
                if rest.strip():
                    segments.append(_padded("dependent", "text", rest, block_size, None))
            elif buffer.strip():
                segments.append(_padded("dependent", "text", buffer, block_size, None))
            frame = None if settings.frame == "none" else prefix
            segments.append(_span(piece.text, piece.id, block_size, frame, salt))
            buffer = ""
    text = "\n\n".join([*(span.text for span in reversed(late)), buffer])
    return [*segments, FakeSegment("dependent", "question", text, 0, None)]


def _best_last(pieces: Sequence[Text | Span]) -> list[Text | Span]:
    """In each run of documents: those without a rank, then the others, the best one last."""
    ordered: list[Text | Span] = []
    run: list[Span] = []
    for piece in pieces:
        if isinstance(piece, Span):
            run.append(piece)
        elif piece.text.strip() or not run:
            ordered += [*_in_order(run), piece]
            run = []
    return [*ordered, *_in_order(run)]


def _in_order(run: Sequence[Span]) -> list[Span]:
    ranked = [span for span in reversed(run) if span.rank is not None]
    unranked = [span for span in run if span.rank is None]
    return unranked + sorted(ranked, key=lambda span: -(span.rank or 0))


def _span(
    text: str, label: str | None, block_size: int, frame: str | None, salt: str | None
) -> FakeSegment:
    """A span behind `frame` (the text of the prefix, or None), whatever blank lines it came in."""
    text = document_core(text)
    key = ("span", salt, frame, text)
    return _padded("span", label or "document", text, block_size, key)


def _padded(kind: str, label: str, text: str, block_size: int, key: Hashable) -> FakeSegment:
    bare = FakeSegment(kind, label, text, 0, key)
    return FakeSegment(kind, label, text, -bare.num_tokens % block_size, key)


def _pieces(prompt: Prompt) -> Iterator[Text | Span]:
    yield from close_texts(prompt.parts)
    if prompt.tools:
        yield Text(f"<tools>{list(prompt.tools)}\n")
    for message in prompt.messages:
        yield Text(f"<{message.role}>\n")
        yield from close_texts(message.parts)
        yield Text(f"{message.extra}\n" if message.extra else "\n")
    if prompt.is_chat and prompt.add_generation_prompt:
        yield Text("<assistant>\n")
