"""One call of the model, as the engine will get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.minipic._condensing import with_less_history
from llama_index.llms.minipic._history import trimmed
from llama_index.llms.minipic._messages import to_prompt

from minipic_backend import ConfigurationError, EngineProtocol, Prompt
from minipic_backend.sampling import LAYOUT_OPTIONS
from minipic_backend.tools import AnswerPlan, plan_answer

__all__ = ["TOOL_OPTIONS", "ChatRequest", "PlannedRequest", "fits"]

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
        window: tokens of the context, where fewer are to be used than the engine has.
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
    window: int | None = None

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
            kept = self._with_less_history(kept, plan, engine)
        return PlannedRequest(
            "chat",
            self._prompt(kept, plan),
            {**plan.options, **self.options},
            plan,
            len(self.messages) - len(kept),
        )

    def _with_less_history(
        self, messages: Sequence[ChatMessage], plan: AnswerPlan, engine: EngineProtocol
    ) -> Sequence[ChatMessage]:
        """Where the last message is a chat to be condensed."""
        last = messages[-1] if messages else ChatMessage()
        text = last.content or ""

        def but(text: str) -> list[ChatMessage]:
            return [*messages[:-1], ChatMessage(role=last.role, content=text)]

        kept = with_less_history(text, lambda text: self._fits(but(text), plan, engine))
        return messages if kept == text else but(kept)

    def _prompt(self, messages: Sequence[ChatMessage], plan: AnswerPlan) -> Prompt:
        return to_prompt(messages, tools=plan.tools, template_kwargs=self.template_kwargs)

    def _fits(
        self, messages: Sequence[ChatMessage], plan: AnswerPlan, engine: EngineProtocol
    ) -> bool:
        """Whether the prompt, and an answer of `num_output` tokens, have room in the context."""
        prompt = self._prompt(messages, plan)
        return fits(prompt, engine, self.options, self.num_output, self.window)


def fits(
    prompt: Prompt,
    engine: EngineProtocol,
    options: Mapping[str, Any],
    num_output: int,
    window: int | None = None,
) -> bool:
    """Whether a prompt, and an answer of `num_output` tokens, have room in the context, or in
    `window` tokens of it."""
    size = min(window or engine.max_model_len, engine.max_model_len)
    room = size - min(num_output, size // 2)
    if _most_tokens(prompt) <= room:
        return True
    layout = {name: value for name, value in options.items() if name in LAYOUT_OPTIONS}
    return engine.count_prompt_tokens(prompt, **layout) <= room


def _most_tokens(prompt: Prompt) -> int:
    """More tokens than the prompt can have: no token is shorter than a byte."""
    if prompt.tools or prompt.template_kwargs:
        return 1 << 62
    texts = [part.text for message in prompt.messages for part in message.parts]
    texts += [part.text for part in prompt.parts]
    extras = sum(len(str(message.extra)) for message in prompt.messages)
    pads = (len(prompt.spans) + 2) * 128
    sizes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + extras
    return sizes + pads + _MESSAGE_BYTES * len(prompt.messages) + _PROMPT_BYTES
