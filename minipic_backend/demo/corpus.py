"""Passages about Python that every machine has: the language reference inside Python itself.

`pydoc_data.topics` holds what `help("with")` shows: chapters of the reference, rendered as text.
They are cut at their headings, freed of markup and grammar, and packed into passages of about
150 tokens that never cross a heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["MAX_SIZE", "MIN_SIZE", "Passage", "load_passages", "size", "split_topic"]

MIN_SIZE = 70
MAX_SIZE = 200
_TARGET_SIZE = 175

_UNDERLINE = re.compile(r"([*=\-~^])\1{2,}$")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z“\"(`])")
_ITEM = re.compile(r"(?:[*•-]|\d+\.)\s+")
_TABLE = re.compile(r"\s*(\+[-=]{3,}|\|.*\|$|={3,}\s+=)")
_WORD = re.compile(r"\w+|[^\w\s]")
_ANNOUNCES = re.compile(r"(:|—|[\w\])…]\)?)$")
_FOOTNOTE = re.compile(r"\s?\[\d+\]")
_EMPHASIS = re.compile(r"(?<![\w*\"])(\*\*?)(?=\w)([^*\"\n]{1,60}?)(?<=\w)\1(?![\w*\"])")
_BROKEN_WORD = re.compile(r"(?<=[a-z]-) (?=[a-z])")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of one section of the reference.

    Args:
        id: topic and number, such as "with-2"; stable for one version of Python.
        title: the section's heading.
        text: the passage, without its title.
    """

    id: str
    title: str
    text: str

    @property
    def content(self) -> str:
        """What the model reads: title and text."""
        return f"{self.title}\n{self.text}"


def load_passages() -> list[Passage]:
    """All passages of the running Python's reference, in a stable order; no text twice.

    Chapters overlap (help("if") is a section of help("compound") too), so the first one wins.
    """
    from pydoc_data.topics import topics

    passages: dict[str, Passage] = {}
    for topic in sorted(topics):
        for passage in split_topic(topic, topics[topic]):
            passages.setdefault(" ".join(passage.text.split()), passage)
    return list(passages.values())


def size(text: str) -> int:
    """Words and punctuation marks: within a tenth of SmolLM2's tokens on text like this."""
    return len(_WORD.findall(text))


def split_topic(topic: str, text: str) -> list[Passage]:
    """The passages of one chapter, each of `MIN_SIZE` to `MAX_SIZE` words."""
    passages: list[Passage] = []
    for title, body in _sections(text):
        for packed in _pack(_blocks(body)):
            if size(packed) >= MIN_SIZE:
                passages.append(Passage(f"{topic}-{len(passages)}", title or topic, packed))
    return passages


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """(heading, lines below it)."""
    title: str = ""
    body: list[str] = []
    lines = text.expandtabs().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.strip() and _UNDERLINE.match(following) and len(following) >= len(line.strip()):
            yield title, body
            title, body = _clean(line.strip()), []
        elif not _UNDERLINE.match(line):
            body.append(line)
    yield title, body


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs as one line each; code as it stands; grammar and tables left out.

    What announces the next block ("Note:", the head of a definition) is put in front of it.
    """
    block: list[str] = []
    head = ""
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            text = _render(block)
            block = []
            if text and "\n" not in text and len(text) < 200 and _ANNOUNCES.search(text):
                head += text + "\n"
            elif text:
                yield head + text
                head = ""


def _render(block: list[str]) -> str:
    if any("::=" in line or _TABLE.match(line) for line in block):
        return ""
    margin = min(len(line) - len(line.lstrip()) for line in block)
    dedented = [line[margin:] for line in block]
    if margin and not _is_prose(dedented):
        return "\n".join(line.rstrip() for line in dedented)
    return _clean(" ".join(line.strip() for line in dedented))


def _is_prose(lines: list[str]) -> bool:
    """Indented text is code, or the body of a definition or an item of a list."""
    text = " ".join(lines)
    words = re.findall(r"[A-Za-z]{2,}", text)
    starts_like_prose = bool(re.match(r"[A-Z“*\"(]|\d+\. ", lines[0]))
    return starts_like_prose and len(words) >= 6 and sum(map(len, words)) > 0.6 * len(text)


def _pack(blocks: Iterable[str]) -> Iterator[str]:
    """Blocks joined up to about `_TARGET_SIZE`; a short rest joins what precedes it."""
    pieces = [piece for block in blocks for piece in _cut(block)]
    packed: list[str] = []
    for piece in pieces:
        if packed and size(packed[-1]) + size(piece) < _TARGET_SIZE:
            packed[-1] += "\n" + piece
        else:
            packed.append(piece)
    if len(packed) > 1 and size(packed[-1]) < MIN_SIZE:
        last = packed.pop()
        if size(packed[-1]) + size(last) <= MAX_SIZE:
            packed[-1] += "\n" + last
    yield from packed


def _cut(block: str) -> Iterator[str]:
    """A block, in pieces where it is long: between sentences, or between lines of code."""
    is_code = "\n" in block
    parts, glue = (block.split("\n"), "\n") if is_code else (_SENTENCE_END.split(block), " ")
    piece = ""
    for part in parts:
        if size(part) > _TARGET_SIZE:  # no place to cut at: a table squeezed into a line
            continue
        if piece and size(piece) + size(part) >= _TARGET_SIZE:
            yield piece
            piece = part
        else:
            piece += glue + part if piece else part
    if piece:
        yield piece


def _clean(text: str) -> str:
    text = _FOOTNOTE.sub("", _EMPHASIS.sub(r"\2", _BROKEN_WORD.sub("", text))).strip()
    return _ITEM.sub("- ", text, count=1) if _ITEM.match(text) else text
