"""A model's tokenizer, without the model."""

from __future__ import annotations

from typing import Any

from minipic_backend.errors import ModelNotFoundError, shown

__all__ = ["load_tokenizer"]


def load_tokenizer(name: str) -> Any:
    """A tokenizer from a folder or the Hugging Face hub.

    Raises:
        ModelNotFoundError: there is none, or it cannot be had.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelNotFoundError(f"no tokenizer for {shown(name)}: {reason}") from error
