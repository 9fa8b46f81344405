"""A prompt as the chat template shows it: marked text, and documents where they stand.

What callers wrote goes through the template with every special token's text, and every document,
replaced by a sentinel. What looks like a special token afterwards is the template's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from minipic_backend.chat import close_texts
from minipic_backend.errors import PromptError, shown
from minipic_backend.layout.surrogates import check_prompt
from minipic_backend.layout.tokenizer import Tokenizer, tokenizer_name
from minipic_backend.layout.tokens import TextEncoder, any_of
from minipic_backend.prompt import Message, Part, Prompt, Span, Text
from minipic_backend.tools.rendering import spell_out_tools
from minipic_backend.tools.syntax import template_text

__all__ = ["Piece", "Renderer"]

Piece = str | Span
"""Text marked by `TextEncoder.mark`, or a document."""

_FIRST_LINE = re.compile(r"\s*\S.*\n+")

_CHANGES = "The chat template changes the text of a message or document"


class Renderer:
    """Renders prompts of one tokenizer. Thread-safe.

    Args:
        tokenizer: holds the chat template.
        encoder: knows the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, encoder: TextEncoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        specials = encoder.special_texts
        self._specials = any_of(specials)
        # A text may also complete, or begin, a special token's text that stands next to it.
        self._heads = {text[:i] for text in specials for i in range(1, len(text))}
        self._tails = {text[i:] for text in specials for i in range(1, len(text))}
        self._longest = max(map(len, specials), default=0)

    def render(self, prompt: Prompt) -> tuple[Piece, ...]:
        """The pieces of a prompt in order: no two texts meet, no text is empty.

        Raises:
            PromptError: no chat template, or one that refuses the messages or drops a document;
                text that is no Unicode.
        """
        check_prompt(prompt)
        if prompt.is_chat:
            template = template_text(self._tokenizer, prompt.template_kwargs)
            prompt = spell_out_tools(prompt, template)
        hidden = _Hidden(prompt)
        if prompt.is_chat:
            text = self._apply_template(prompt, hidden)
        else:
            text = self._hide_parts(prompt.parts, hidden)
        pieces: list[Piece] = []
        for is_span, group in groupby(
            hidden.reveal(text, self._encoder), key=lambda piece: isinstance(piece, Span)
        ):
            if is_span:
                pieces += group
            elif joined := "".join(str(piece) for piece in group):
                pieces.append(joined)
        return tuple(pieces)

    def opening(self, role: str, template_kwargs: Mapping[str, Any] | None = None) -> str:
        """What the chat template puts in front of a chat's first message, as marked text: its first
        line, with the line breaks behind it, or all of it where it is shorter.

        What stands behind the first line may change from day to day or from chat to chat: a date,
        a system prompt of the template's own.

        Args:
            role: of the first message.
            template_kwargs: options of the template.

        Returns:
            Empty where there is nothing, or no such chat.
        """
        nonce = _nonce()
        messages = [Message(role, nonce), *([] if role == "user" else [Message("user", "?")])]
        prompt = Prompt.chat(messages, template_kwargs=template_kwargs)
        try:
            text, found, _ = self._apply_template(prompt, _Hidden(prompt)).partition(nonce)
        except PromptError:
            return ""
        line = _FIRST_LINE.match(text)
        return self._encoder.mark(line[0] if line else text) if found else ""

    def _apply_template(self, prompt: Prompt, hidden: _Hidden) -> str:
        options = dict(prompt.template_kwargs)
        override = options.pop("chat_template", None)
        if not (override or getattr(self._tokenizer, "chat_template", None)):
            raise PromptError(
                f"The tokenizer {tokenizer_name(self._tokenizer)} has no chat template: give a "
                "raw prompt, Prompt([Text(...), Span(...)]), or one in "
                "template_kwargs={'chat_template': ...}"
            )
        options = self._hide(options, hidden)
        if override:
            options["chat_template"] = override
        if prompt.tools:
            options["tools"] = self._hide(prompt.tools, hidden)
        options |= {"tokenize": False, "add_generation_prompt": prompt.add_generation_prompt}
        messages = [self._hide_message(message, hidden) for message in prompt.messages]
        try:
            return str(self._tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # whatever a template's code may raise
            raise PromptError(f"The chat template does not take this prompt: {error}") from error

    def _hide_message(self, message: Message, hidden: _Hidden) -> dict[str, Any]:
        return {
            "role": self._hide(message.role, hidden),
            "content": self._hide_parts(message.parts, hidden),
            **self._hide(message.extra, hidden),
        }

    def _hide_parts(self, parts: Iterable[Part], hidden: _Hidden) -> str:
        return "".join(
            hidden.add(part) if isinstance(part, Span) else self._hide_text(part.text, hidden)
            for part in close_texts(parts)
        )

    def _hide(self, value: Any, hidden: _Hidden) -> Any:
        """A copy of `value` with all strings in it, however deep, safe to go to the template."""
        if isinstance(value, str):
            return self._hide_text(value, hidden)
        if isinstance(value, Mapping):
            return {
                self._hide(key, hidden): self._hide(item, hidden) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hide(item, hidden) for item in value]
        return value

    def _hide_text(self, text: str, hidden: _Hidden) -> str:
        ranges = [match.span() for match in self._specials.finditer(text)]
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        lengths = range(min(self._longest - 1, end - start), 0, -1)
        tail = next((n for n in lengths if text[start : start + n] in self._tails), 0)
        head = next((n for n in lengths if text[end - n : end] in self._heads), 0)
        ranges += [(start, start + tail)] * bool(tail) + [(end - head, end)] * bool(head)
        result, done = "", 0
        for low, high in _merged(ranges):
            result += text[done:low] + hidden.add(text[low:high])
            done = high
        return result + text[done:]


class _Hidden:
    """What stands behind the sentinels of one prompt."""

    def __init__(self, prompt: Prompt) -> None:
        self._items: list[Piece] = []
        texts = list(_texts(prompt))
        self._nonce = _nonce()
        while any(self._nonce in text for text in texts):
            self._nonce = _nonce()

    def add(self, item: Piece) -> str:
        """The sentinel that stands for `item`: letters and digits, so that templates, JSON and
        trimming leave it alone."""
        self._items.append(item)
        return f"{self._nonce}{len(self._items) - 1}Z"

    def reveal(self, rendered: str, encoder: TextEncoder) -> list[Piece]:
        """Splits what the template made at the sentinels and puts everything back."""
        first, *rest = rendered.split(self._nonce)
        pieces: list[Piece] = [encoder.mark(first)]
        scaffold = [first]
        seen: set[int] = set()
        for part in rest:
            number, end, text = part.partition("Z")
            if not (end and number.isdecimal()) or int(number) >= len(self._items):
                raise PromptError(_CHANGES)
            seen.add(int(number))
            pieces += [self._items[int(number)], encoder.mark(text)]
            scaffold.append(text)
        for index, item in enumerate(self._items):
            if isinstance(item, Span) and index not in seen:
                raise PromptError(f"The chat template leaves out a document: {shown(item.text)}")
        if self._nonce.lower() in "".join(scaffold).lower():
            raise PromptError(_CHANGES)
        return pieces


def _nonce() -> str:
    return f"Q{secrets.token_hex(8)}Q"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Text | Span):
        yield value.text
    elif isinstance(value, Prompt):
        yield from _texts((value.parts, value.messages, value.tools, value.template_kwargs))
    elif isinstance(value, Message):
        yield from _texts((value.role, value.parts, value.extra))
    elif isinstance(value, Mapping):
        yield from _texts((*value.keys(), *value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _merged(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The union of the ranges, in order, without overlaps."""
    pending: tuple[int, int] | None = None
    for low, high in sorted(ranges):
        if pending and low < pending[1]:
            pending = (pending[0], max(pending[1], high))
            continue
        if pending:
            yield pending
        pending = (low, high)
    if pending:
        yield pending
