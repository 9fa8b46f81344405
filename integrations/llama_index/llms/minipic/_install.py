"""One call that sets LlamaIndex up."""

from __future__ import annotations

from typing import Any

from llama_index.llms.minipic.base import MiniPIC

__all__ = ["install"]


def install(settings: Any, llm: MiniPIC, *, tokenizer: bool = True) -> MiniPIC:
    """Make `llm` the model of LlamaIndex, with nodes kept whole, and start its engine.

    Sets `settings.llm`, `settings.prompt_helper`, `settings.chat_prompt_helper` and, unless
    `tokenizer` is False, `settings.tokenizer`: chunk sizes and memories are counted in the
    model's own tokens then.

    Args:
        settings: `llama_index.core.Settings`.
        llm: the model; given back.
        tokenizer: whether to set the tokenizer.
    """
    llm.start()
    settings.llm = llm
    settings.prompt_helper = llm.prompt_helper
    settings.chat_prompt_helper = llm.chat_prompt_helper
    if tokenizer:
        settings.tokenizer = llm.token_ids
    return llm
