"""A stand-in for tokenizer, chat template and layout, for the fake engine alone.

It keeps the shape of the real thing (prefix, spans, dependent text, markers, pads to the block
border), not its tokens: a token here is a word with the whitespace before it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from zlib import crc32

from minipic_backend.config import TechniqueSettings
from minipic_backend.prompt import Prompt, Span, Text

__all__ = ["FakeSegment", "lay_out", "span_segment", "split_tokens", "token_id"]

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


def lay_out(
    prompt: Prompt, settings: TechniqueSettings, block_size: int, salt: str | None = None
) -> list[FakeSegment]:
    """Segments of `prompt`, in order."""
    pieces = list(_pieces(prompt))
    ranked = sorted(
        (piece for piece in pieces if isinstance(piece, Span) and piece.rank is not None),
        key=lambda span: span.rank or 0,
    )
    late = ranked[: settings.late] if settings.spans else []
    spans = [p for p in pieces if isinstance(p, Span) and not any(p is one for one in late)]
    if not settings.spans or not spans:
        return [FakeSegment("prefix", "prompt", "".join(p.text for p in pieces), 0, None)]

    segments: list[FakeSegment] = []
    primer = _PRIMER if settings.primer == "auto" else settings.primer or ()
    prefix, buffer = "", ""
    for piece in pieces:
        if isinstance(piece, Text):
            buffer += piece.text
        elif any(piece is one for one in late):
            continue
        else:
            if not segments:
                prefix = "\n\n".join([buffer, *primer])
                if prefix:
                    key = ("prefix", salt, prefix)
                    segments.append(_padded("prefix", "prefix", prefix, block_size, key))
            elif buffer.strip():
                segments.append(_padded("dependent", "text", buffer, block_size, None))
            frame = prefix if settings.frame == "prefix" else None
            segments.append(span_segment(piece.text, piece.id, block_size, frame, salt))
            buffer = ""
    text = "\n\n".join([*(span.text for span in reversed(late)), buffer])
    return [*segments, FakeSegment("dependent", "question", text, 0, None)]


def span_segment(
    text: str, label: str | None, block_size: int, frame: str | None, salt: str | None
) -> FakeSegment:
    """A span behind `frame` (the text of the prefix, or None)."""
    key = ("span", salt, frame, text)
    return _padded("span", label or "document", text, block_size, key)


def _padded(kind: str, label: str, text: str, block_size: int, key: Hashable) -> FakeSegment:
    bare = FakeSegment(kind, label, text, 0, key)
    return FakeSegment(kind, label, text, -bare.num_tokens % block_size, key)


def _pieces(prompt: Prompt) -> Iterator[Text | Span]:
    yield from prompt.parts
    if prompt.tools:
        yield Text(f"<tools>{list(prompt.tools)}\n")
    for message in prompt.messages:
        yield Text(f"<{message.role}>\n")
        yield from message.parts
        yield Text(f"{message.extra}\n" if message.extra else "\n")
    if prompt.is_chat and prompt.add_generation_prompt:
        yield Text("<assistant>\n")
