"""From LlamaIndex's templates to messages."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.llms.minipic._messages import unmarked
from llama_index.llms.minipic._templates import guarded, unguard, unguarded, with_nodes

__all__ = ["Prompting"]


class Prompting(LLM):
    """Formats templates so that nodes stay whole and a chat's history stays as it was said."""

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        messages = super()._get_messages(guarded(prompt, self), **with_nodes(prompt_args))
        return [unmarked(message) for message in unguarded(messages)]

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """With marks in it, which the model takes out again: nodes are more than text."""
        return unguard(super()._get_prompt(guarded(prompt, self), **with_nodes(prompt_args)))
