"""A stand-in for tokenizer, chat template and layout, for the fake engine alone.

It keeps the shape of the real thing (prefix, spans, dependent text, markers, pads to the block
border), not its tokens: a token here is a word with the whitespace before it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        head = _lay_out(prompt, settings, self._block_size, salt)[0]
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
    head, sections = _read_sections(pieces)
    if not (settings.spans and sections):
        return [FakeSegment("prefix", "prompt", "".join(p.text for p in pieces), 0, None)]

    opening = head
    if settings.frame == "universal":
        opening = f"<{prompt.messages[0].role}>\n" if prompt.is_chat else ""
    primer = _PRIMER if settings.primer == "auto" else settings.primer or ()
    prefix = "\n\n".join([opening, *(primer if settings.frame != "none" else ())])
    segments: list[FakeSegment] = []
    if prefix:
        segments.append(_padded("prefix", "prefix", prefix, block_size, ("prefix", salt, prefix)))
    rest = head.removeprefix(opening) if opening != head else ""
    if rest.strip():
        segments.append(_padded("dependent", "text", rest, block_size, None))
    frame = None if settings.frame == "none" else prefix
    for section in sections:
        is_last = section is sections[-1]
        late = section.ranked()[: settings.late] if is_last else []
        places = section.best_last() if settings.best_last else range(len(section.spans))
        for place in places:
            if place not in late:
                span = section.spans[place]
                segments.append(_span(span.text, span.id, block_size, frame, salt))
        if is_last:
            shown = [section.spans[place].text for place in reversed(late)]
            text = "\n\n".join([*shown, section.text])
            segments.append(FakeSegment("dependent", "question", text, 0, None))
        else:
            segments.append(_padded("dependent", "text", section.text, block_size, None))
    return segments


@dataclass
class _Section:
    """A run of documents and the text behind it."""

    spans: list[Span]
    text: str = ""

    def ranked(self) -> list[int]:
        """Places of the documents that have ranks, the best one first."""
        ranks = {place: span.rank for place, span in enumerate(self.spans)}
        return sorted((p for p in ranks if ranks[p] is not None), key=lambda p: ranks[p] or 0)

    def best_last(self) -> list[int]:
        """Places of those without a rank, then of the others, the best one last."""
        ranked = self.ranked()
        return [place for place in range(len(self.spans)) if place not in ranked] + ranked[::-1]


def _read_sections(pieces: Iterable[Text | Span]) -> tuple[str, list[_Section]]:
    """Text before the first document, and the runs behind it. What white space separates
    documents belongs to none of them."""
    head = ""
    sections: list[_Section] = []
    for piece in pieces:
        if isinstance(piece, Span):
            if not sections or sections[-1].text:
                sections.append(_Section([]))
            sections[-1].spans.append(piece)
        elif sections:
            sections[-1].text = (sections[-1].text + piece.text).lstrip()
        else:
            head += piece.text
    return head, sections


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
