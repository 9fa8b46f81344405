"""Placeholders that carry values through a text template untouched.

A formatted template is one string. Values put in as slots come out of it whole, and nothing
inside them is ever read as template syntax.
"""

from __future__ import annotations

import re
import secrets
from typing import Generic, TypeVar

from minipic_backend import PromptError

__all__ = ["Slots"]

T = TypeVar("T")


class Slots(Generic[T]):
    """Slots of one formatting run. Their names cannot be guessed, so no input can forge one."""

    def __init__(self) -> None:
        self._nonce = f"d{secrets.token_hex(8)}"  # a letter, so that capitals differ
        self._pattern = re.compile(f"\x00{self._nonce}:(\\d+)\x00")
        # Written otherwise (JSON, capitals), or its beginning, where it was cut off.
        self._altered = re.compile(f"(?:\x00|x00|u0000){self._nonce[:3]}|{self._nonce}", re.I)
        self._values: list[T] = []

    def add(self, value: T) -> str:
        """Text that stands for `value`."""
        self._values.append(value)
        return f"\x00{self._nonce}:{len(self._values) - 1}\x00"

    def split(self, text: str) -> list[str | T]:
        """`text` as strings (never empty) and the values between them, in order.

        Raises:
            PromptError: a slot was changed on its way, so that its value would be lost.
        """
        pieces = self._pattern.split(text)
        if any(self._altered.search(piece) for piece in pieces[::2]):
            raise PromptError(
                "The template changes documents as it prints them (a filter such as tojson, upper "
                "or truncate does): print them as they are, or change them before they go in"
            )
        return [
            self._values[int(piece)] if place % 2 else piece
            for place, piece in enumerate(pieces)
            if place % 2 or piece
        ]

    def occurs_in(self, value: object) -> bool:
        """Whether any slot stands somewhere inside a nested value, be it a changed one."""
        return self._altered.search(repr(value)) is not None
