"""What we ask of a tokenizer: a part of Hugging Face's interface, so that any may be passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["AddedToken", "Tokenizer", "chat_templates", "tokenizer_name"]


class AddedToken(Protocol):
    """A token that is matched in a text before the model's own segmentation sees it."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def rstrip(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...


class Tokenizer(Protocol):
    """A Hugging Face tokenizer. `backend_tokenizer` (a `tokenizers.Tokenizer`), `chat_template`,
    `bos_token_id` and the like are used where they are there."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[Any], **kwargs: Any) -> Any: ...


def chat_templates(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Every chat template of a tokenizer: it may have none, one, or several with names."""
    templates = getattr(tokenizer, "chat_template", None)
    if not templates:
        return ()
    if isinstance(templates, str):
        return (templates,)
    if isinstance(templates, Mapping):
        return tuple(str(template) for template in templates.values())
    return tuple(
        str(entry["template"] if isinstance(entry, Mapping) else entry) for entry in templates
    )


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """A name for messages: where it was loaded from, or its class."""
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
