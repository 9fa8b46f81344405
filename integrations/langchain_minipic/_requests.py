"""One call of the chat model, as the engine will get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage

from langchain_minipic._tools import constraint
from langchain_minipic.messages import to_prompt
from minipic_backend import ConfigurationError, EngineProtocol, Prompt
from minipic_backend.tools import AnswerPlan, plan_answer

__all__ = ["TOOL_OPTIONS", "ChatRequest", "PlannedRequest", "sort_options"]

TOOL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "strict"})
"""Options of a call that concern tools."""


@dataclass(frozen=True)
class PlannedRequest:
    """A prompt, options for the engine, and how to read the answer."""

    prompt: Prompt
    options: dict[str, Any]
    plan: AnswerPlan


@dataclass(frozen=True)
class ChatRequest:
    """A call before its engine is known.

    Args:
        messages: the chat.
        options: for the engine.
        template_kwargs: variables for the chat template.
        tools: `TOOL_OPTIONS` that were given.
        tool_parser, reasoning_parser: see `plan_answer`.
    """

    messages: Sequence[BaseMessage]
    options: dict[str, Any]
    template_kwargs: Mapping[str, Any]
    tools: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None

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
            strict=self.tools.get("strict") is True,
            template_kwargs=self.template_kwargs,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            structured=self.options.get("structured_outputs") is not None,
        )
        if plan.vllm_parser is not None:
            plan.parser()  # one that is not to be had fails here, not after the answer
        if twice := self.options.keys() & plan.options.keys() & {"structured_outputs"}:
            raise ConfigurationError(f"A forced tool call and {twice.pop()} exclude each other")
        prompt = to_prompt(self.messages, tools=plan.tools, template_kwargs=self.template_kwargs)
        return PlannedRequest(prompt, {**plan.options, **self.options}, plan)


def sort_options(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's options without, and those that concern, tools.

    Raises:
        ConfigurationError: an unknown `response_format`, or one beside `structured_outputs`.
    """
    options = {name: value for name, value in kwargs.items() if name not in TOOL_OPTIONS}
    tools = {name: value for name, value in kwargs.items() if name in TOOL_OPTIONS}
    if (format := options.pop("response_format", None)) is not None:
        if options.get("structured_outputs") is not None:
            raise ConfigurationError("response_format and structured_outputs exclude each other")
        options |= constraint(format)
    return options, tools
