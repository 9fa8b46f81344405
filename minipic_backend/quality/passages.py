"""Passages that questions are made from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError

__all__ = ["Passage", "load_passages", "read_jsonl"]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text about one subject, and the subject's name."""

    title: str
    text: str

    @property
    def whole(self) -> str:
        """Title and text, as a retriever sees them."""
        return f"{self.title}\n{self.text}"

    @property
    def subject(self) -> str:
        """The title without what tells it from its namesakes: "Caresses (film)" is "Caresses"."""
        head, _, tail = self.title.partition(" (")
        return head if tail.endswith(")") else self.title


def load_passages(path: Path) -> list[Passage]:
    """Passages of a JSONL file with `title` and `text` on each line; no title twice.

    Raises:
        ConfigurationError: no such file, or a line that is no passage.
    """
    passages: dict[str, Passage] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            passage = Passage(str(row["title"]), str(row["text"]))
        except KeyError as error:
            raise ConfigurationError(
                f"{path}, line {number}: {error} is missing; a passage has a title and a text"
            ) from error
        passages.setdefault(passage.title, passage)
    return list(passages.values())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, one a line.

    Raises:
        ConfigurationError: no such file, or a line that is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path}, line {number}: not a JSON object")
        rows.append(row)
    return rows
