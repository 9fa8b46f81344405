"""A digest of everything about a tokenizer that a layout depends on.

Taken from what it does, not from its files: two releases of a library write the same tokenizer
down differently.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from minipic_backend.layout.tokenizer import Tokenizer, chat_templates

__all__ = ["tokenizer_digest"]

# Merges are not part of a vocabulary, but these depend on them: words, digits, spaces, line
# breaks, accents, scripts, code, an emoji.
_PROBE = (
    "The wife of Lothair II was Teutberga; they married in 855.\n\n  Two  spaces,\ttabs. "
    "Überraschung naïve señor Çeşme łódź Ελλάδα Москва 東京都 한국어 العربية हिन्दी ไทย 🙂👩‍🚀 "
    "def f(x: int) -> str: return f'{x!r:>10}' # 3.14159 12345678 http://a.b/c?d=e&f=g\r\n"
    "antidisestablishmentarianism unbelievably SHOUTING camelCaseWord snake_case_word"
)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256, in hex, of vocabulary, added tokens, BOS, chat template and a probe's token ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    added = sorted(
        (token_id, token.content, token.special, token.lstrip, token.rstrip, token.single_word)
        for token_id, token in tokenizer.added_tokens_decoder.items()
    )
    facts: list[Any] = [
        vocabulary,
        added,
        list(tokenizer.encode("", add_special_tokens=True)),
        list(chat_templates(tokenizer)),
        list(tokenizer.encode(_PROBE, add_special_tokens=False)),
    ]
    return hashlib.sha256(json.dumps(facts, ensure_ascii=True).encode()).hexdigest()
