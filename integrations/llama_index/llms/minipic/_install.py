"""One call that sets LlamaIndex up."""

from __future__ import annotations

from typing import Any

import llama_index.core
from llama_index.llms.minipic.base import MiniPIC

from minipic_backend import ConfigurationError

__all__ = ["install"]


def install(settings: Any, llm: MiniPIC, *, tokenizer: bool = True) -> MiniPIC:
    """Make `llm` the model of LlamaIndex, with nodes kept whole, and start its engine.

    Sets `settings.llm`, `settings.prompt_helper`, `settings.chat_prompt_helper` and, unless
    `tokenizer` is False, `settings.tokenizer`: chunk sizes and memories are counted in the
    model's own tokens then. All that is undone when `llm` is closed.

    Args:
        settings: `llama_index.core.Settings`.
        llm: the model; given back.
        tokenizer: whether to set the tokenizer.

    Raises:
        ConfigurationError: `llm` is no `MiniPIC`.
    """
    if not isinstance(llm, MiniPIC):
        raise ConfigurationError(
            f"install(Settings, MiniPIC(model=…)): got {type(llm).__name__} in place of the model"
        )
    llm.start()
    helper, chat_helper = llm.prompt_helper, llm.chat_prompt_helper
    settings.llm = llm
    settings.prompt_helper = helper
    settings.chat_prompt_helper = chat_helper
    if tokenizer:
        settings.tokenizer = llm.token_ids

    def uninstall() -> None:
        """A closed model counts no tokens: nobody else should find it."""
        ours = {"_llm": llm, "_prompt_helper": helper, "_chat_prompt_helper": chat_helper}
        for name, value in ours.items():
            if getattr(settings, name) is value:
                setattr(settings, name, None)
        if llama_index.core.global_tokenizer == llm.token_ids:
            llama_index.core.global_tokenizer = None

    llm.call_on_close(uninstall)
    return llm
