"""Text to token ids, so that no text of a caller can become a special token.

A string that comes out of a chat template is first *marked*: each special token in it is replaced
by a placeholder that only our private copy of the tokenizer knows. Whatever else in the string
looks like a special token then is plain text, and still the whole is segmented in one go, exactly
as the tokenizer itself would do it.
"""

from __future__ import annotations

import copy
import re
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from minipic_backend.errors import ConfigurationError, PromptError, shown
from minipic_backend.layout.surrogates import check_encodable
from minipic_backend.layout.tokenizer import AddedToken, Tokenizer, chat_templates, tokenizer_name

__all__ = ["TextEncoder", "any_of"]

_TAG = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest that fits; nothing where there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class TextEncoder:
    """Encodes text with special tokens off, but for those that were marked. Thread-safe.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow; it is copied, never changed.
        reserved_ids: the markers: text that encodes to one of them is refused.
        max_cached_tokens: tokens of documents to remember, over all documents.

    Attributes:
        special_texts: texts of the special tokens, which callers' text may hold as plain text.
        bos: what the tokenizer puts in front of a raw prompt: one token id, or nothing.
        newline: token id of a line break (of a space, where a line break is several tokens).

    Raises:
        ConfigurationError: a tokenizer whose special tokens cannot be switched off, or that has
            neither line break nor space.
    """

    def __init__(
        self, tokenizer: Tokenizer, reserved_ids: Iterable[int], max_cached_tokens: int = 1_000_000
    ) -> None:
        self._name = tokenizer_name(tokenizer)
        self._reserved = frozenset(reserved_ids)
        self._documents = _TokenCache(max_cached_tokens)
        self._decode = lru_cache(maxsize=16384)(lambda ids: str(tokenizer.decode(list(ids))))
        added: dict[int, AddedToken] = {
            token_id: token
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        }
        special = {i: token for i, token in added.items() if token.special}
        # Tags such as <tool_call> in Qwen's templates: a structure of the chat all the same.
        templates = chat_templates(tokenizer)
        structural = {
            i: token
            for i, token in added.items()
            if not token.special
            and _TAG.fullmatch(token.content)
            and any(token.content in template for template in templates)
        }
        self.special_texts = tuple(token.content for token in special.values())
        self._placeholders: dict[str, str] = {}
        placeholder_tokens: dict[str, tuple[int, AddedToken]] = {}
        nonce = secrets.token_hex(8)
        for token_id, token in (special | structural).items():
            placeholder = f"\ue000{nonce}x{token_id}\ue001"
            self._placeholders[token.content] = placeholder
            placeholder_tokens[placeholder] = (token_id, token)
        self._texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._special_pattern = any_of(self._placeholders)
        self._placeholder_pattern = any_of(self._texts)

        off = [
            token.content for i, token in added.items() if i in structural or i in self._reserved
        ]
        self._encode = (
            _fast_encode(tokenizer, placeholder_tokens, off, lead=f"\ue000{nonce}lead\ue001")
            if getattr(tokenizer, "backend_tokenizer", None) is not None
            else _slow_encode(tokenizer, placeholder_tokens, self._placeholder_pattern)
        )
        for token_id, token in special.items():
            if token_id in self._encode(token.content, False):
                raise ConfigurationError(
                    f"The tokenizer {self._name} turns the plain text {shown(token.content)} into "
                    "a special token even when told not to: documents could forge it"
                )
        first = tokenizer.encode("", add_special_tokens=True)[:1]
        self.bos = tuple(first) if first == [getattr(tokenizer, "bos_token_id", None)] else ()
        self.newline = self._single("\n", " ")

    def mark(self, text: str) -> str:
        """`text` with the special tokens in it meant as such; see `encode`."""
        return self._special_pattern.sub(lambda match: self._placeholders[match[0]], text)

    def unmark(self, text: str) -> str:
        """The inverse of `mark`, for people to read."""
        return self._placeholder_pattern.sub(lambda match: self._texts[match[0]], text)

    def until_special(self, marked: str) -> str:
        """A marked text up to its first special token: what is left of the message it is in."""
        return self._placeholder_pattern.split(marked, maxsplit=1)[0]

    def through_last_special(self, marked: str) -> str:
        """A marked text up to the end of its last special token; empty where it has none."""
        end = 0
        for match in self._placeholder_pattern.finditer(marked):
            end = match.end()
        return marked[:end]

    def ends_special(self, marked: str) -> bool:
        """Whether a marked text ends in a special token."""
        return marked.endswith(tuple(self._texts))

    def encode(self, text: str, *, first: bool = False) -> list[int]:
        """Token ids of a text; its marked special tokens become such, all else is plain.

        Args:
            text: may hold placeholders that `mark` put there.
            first: it starts the prompt (some tokenizers put a space there, and only there).

        Raises:
            PromptError: text that is not valid Unicode, or that encodes to a marker.
        """
        if not text:
            return []
        try:
            ids = self._encode(text, first)
        except (TypeError, UnicodeError) as error:  # lone surrogates
            plain = self.unmark(text)
            check_encodable(plain, "A text of the prompt")
            raise PromptError(f"Text that cannot be encoded: {shown(plain)}: {error}") from error
        if not self._reserved.isdisjoint(ids):
            marker = next(token_id for token_id in ids if token_id in self._reserved)
            raise PromptError(
                f"A text of the prompt encodes to token {marker}, which is a marker; choose "
                "other markers for this tokenizer, such as unused special tokens"
            )
        return ids

    def encode_document(self, text: str) -> list[int]:
        """As `encode`, remembering the result."""
        ids = self._documents.get(text)
        if ids is None:
            ids = self.encode(text)
            self._documents.put(text, ids)
        return ids

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of token ids, for people and for comparing words; remembers the latest."""
        return self._decode(ids)

    def _single(self, *texts: str) -> int:
        for text in texts:
            ids = self.encode(text)
            if len(ids) == 1:
                return ids[0]
        raise ConfigurationError(
            f"The tokenizer {self._name} has no single token for a line break or a space, which "
            "fills the prefix up to a block boundary"
        )


def _fast_encode(
    tokenizer: Any,
    placeholder_tokens: dict[str, tuple[int, AddedToken]],
    off: list[str],
    lead: str,
) -> Callable[[str, bool], list[int]]:
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if off:  # already there; this flags them special, so that they are matched no longer
        backend.add_special_tokens(off)
    real_ids: dict[int, int] = {}
    for placeholder, (token_id, token) in placeholder_tokens.items():
        twin = type(token)(  # type: ignore[call-arg]  # a tokenizers.AddedToken
            placeholder,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=False,
            special=False,
        )
        backend.add_tokens([twin])
        real_ids[backend.token_to_id(placeholder)] = token_id
    backend.add_tokens([_plain_twin(tokenizer, lead)])

    def encode(text: str, first: bool) -> list[int]:
        ids = backend.encode(text if first else lead + text, add_special_tokens=False).ids
        return [real_ids.get(i, i) for i in (ids if first else ids[1:])]

    return encode


def _plain_twin(tokenizer: Any, text: str) -> Any:
    """An added token that swallows no whitespace; a str would be matched in normalized text."""
    kinds = {type(token) for token in tokenizer.added_tokens_decoder.values()}
    return kinds.pop()(text, normalized=False, special=False) if kinds else text


def _slow_encode(
    tokenizer: Tokenizer,
    placeholder_tokens: dict[str, tuple[int, AddedToken]],
    placeholder_pattern: re.Pattern[str],
) -> Callable[[str, bool], list[int]]:
    def encode(text: str, first: bool) -> list[int]:
        ids: list[int] = []
        start, strip = 0, False
        for match in [*placeholder_pattern.finditer(text), None]:
            run = text[start : match.start() if match else len(text)]
            token_id, token = placeholder_tokens[match[0]] if match else (None, None)
            run = run.lstrip() if strip else run
            run = run.rstrip() if token and token.lstrip else run
            if run:
                ids += tokenizer.encode(run, add_special_tokens=False, split_special_tokens=True)
            if match and token and token_id is not None:
                ids.append(token_id)
                start, strip = match.end(), token.rstrip
        return ids

    return encode


class _TokenCache:
    """Token ids by text; the least recently used go first. Bounded by tokens. Thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> list[int] | None:
        with self._lock:
            ids = self._entries.get(text)
            if ids is None:
                return None
            self._entries.move_to_end(text)
        return ids.tolist()

    def put(self, text: str, ids: list[int]) -> None:
        if len(ids) > self._max_tokens:
            return
        with self._lock:
            self._num_tokens += len(ids) - len(self._entries.pop(text, ()))
            self._entries[text] = array("i", ids)
            while self._num_tokens > self._max_tokens:
                _, oldest = self._entries.popitem(last=False)
                self._num_tokens -= len(oldest)
