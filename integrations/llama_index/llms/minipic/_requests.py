"""One call of the model, as the engine will get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.minipic._history import trimmed
from llama_index.llms.minipic._messages import to_prompt

from minipic_backend import ConfigurationError, EngineProtocol, Prompt
from minipic_backend.sampling import LAYOUT_OPTIONS
from minipic_backend.tools import AnswerPlan, plan_answer

__all__ = ["TOOL_OPTIONS", "ChatRequest", "PlannedRequest"]

TOOL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "strict"})

_MESSAGE_BYTES = 64
_PROMPT_BYTES = 1024


@dataclass(frozen=True)
class PlannedRequest:
    """A prompt, options for the engine, and how to read the answer."""

    kind: str
    prompt: Prompt
    options: dict[str, Any]
    plan: AnswerPlan
    dropped_messages: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """A call before its engine is known.

    Args:
        messages: the chat.
        options: for the engine.
        template_kwargs: variables for the chat template.
        tools: `TOOL_OPTIONS` that were given.
        tool_parser, reasoning_parser: see `plan_answer`.
        num_output: tokens to leave for the answer.
        trim: leave out old turns where the chat is too long.
    """

    messages: Sequence[ChatMessage]
    options: dict[str, Any]
    template_kwargs: Mapping[str, Any]
    tools: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    num_output: int = 256
    trim: bool = True

    def on(self, engine: EngineProtocol) -> PlannedRequest:
        """For the engine whose tokenizer tells the model's family.

        Raises:
            ConfigurationError: unknown tools, choice or parser; two structures at once.
            PromptError: messages that we cannot send.
        """
        plan = plan_answer(
            getattr(engine, "tokenizer", None),
            tools=self.tools.get("tools") or (),
            tool_choice=self.tools.get("tool_choice"),
            parallel=self.tools.get("parallel_tool_calls") is not False,
            strict=bool(self.tools.get("strict")),
            template_kwargs=self.template_kwargs,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            structured=self.options.get("structured_outputs") is not None,
        )
        if self.options.keys() & plan.options.keys() & {"structured_outputs"}:
            raise ConfigurationError("A forced tool call and structured_outputs exclude each other")
        kept = self.messages
        if self.trim:
            kept = trimmed(self.messages, lambda messages: self._fits(messages, plan, engine))
        return PlannedRequest(
            "chat",
            self._prompt(kept, plan),
            {**plan.options, **self.options},
            plan,
            len(self.messages) - len(kept),
        )

    def _prompt(self, messages: Sequence[ChatMessage], plan: AnswerPlan) -> Prompt:
        return to_prompt(messages, tools=plan.tools, template_kwargs=self.template_kwargs)

    def _fits(
        self, messages: Sequence[ChatMessage], plan: AnswerPlan, engine: EngineProtocol
    ) -> bool:
        """Whether the prompt, and an answer of `num_output` tokens, have room in the context."""
        window = engine.max_model_len
        room = window - min(self.num_output, window // 2)
        prompt = self._prompt(messages, plan)
        if _most_tokens(prompt) <= room:
            return True
        layout = {name: v for name, v in self.options.items() if name in LAYOUT_OPTIONS}
        return engine.count_prompt_tokens(prompt, **layout) <= room


def _most_tokens(prompt: Prompt) -> int:
    """More tokens than the prompt can have: no token is shorter than a byte."""
    if prompt.tools or prompt.template_kwargs:
        return 1 << 62
    texts = [part.text for message in prompt.messages for part in message.parts]
    extras = sum(len(str(message.extra)) for message in prompt.messages)
    pads = (len(prompt.spans) + 2) * 128
    sizes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + extras
    return sizes + pads + _MESSAGE_BYTES * len(prompt.messages) + _PROMPT_BYTES
