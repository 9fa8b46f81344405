"""All that tools and reasoning mean for one request: prompt, decoding, and how to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minipic_backend.layout.tokenizer import Tokenizer
from minipic_backend.tools.choice import (
    ToolChoice,
    calls_schema,
    calls_tag,
    resolve_tool_choice,
    tool_name,
)
from minipic_backend.tools.parser import AnswerFormat, AnswerParser, TextParser
from minipic_backend.tools.syntax import (
    TOOL_SYNTAXES,
    ToolSyntax,
    find_reasoning_tags,
    find_tool_syntax,
    is_special,
    opens_reasoning,
    reasoning_tags,
    template_text,
)
from minipic_backend.tools.vllm_parser import VllmParser

__all__ = ["AnswerPlan", "plan_answer"]


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What a request with tools needs.

    Args:
        tools: for `Prompt.chat(tools=…)`.
        options: sampling options to add to the request's own.
        format: what the answer may hold.
        choice: what the model does with its tools.
        vllm_parser: a parser of vLLM's that reads tool calls; None: ours.
    """

    tools: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any]
    format: AnswerFormat
    choice: ToolChoice
    vllm_parser: str | None = None
    tokenizer: Any = field(default=None, repr=False)

    def parser(self) -> TextParser:
        """A fresh one, for one answer.

        Raises:
            ConfigurationError: a parser of vLLM's that is not to be had.
        """
        if self.vllm_parser is not None:
            return VllmParser(self.vllm_parser, self.tokenizer, self.tools, self.format)
        return AnswerParser(self.format)


def plan_answer(
    tokenizer: Tokenizer | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: object = None,
    parallel: bool = True,
    strict: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    structured: bool = False,
) -> AnswerPlan:
    """Decides how a request with tools is decoded and read.

    Args:
        tokenizer: its chat template tells the model's family; None: Hermes, no reasoning.
        tools: in OpenAI's form.
        tool_choice: see `resolve_tool_choice`.
        parallel: whether a forced answer may hold several calls.
        strict: with "auto", what begins as a call is held to a tool's schema, where we can write
            the model's syntax. What is forced always is.
        template_kwargs: variables for the chat template, as in the prompt.
        tool_parser: a name in `TOOL_SYNTAXES`, or one of vLLM's; None: by the chat template.
        reasoning_parser: a name in `REASONING_TAGS`; None: by the chat template.
        structured: the request is held to a structure of its own: there is no reasoning.

    Raises:
        ConfigurationError: an unknown tool, choice or parser.
    """
    template_kwargs = template_kwargs or {}
    choice = resolve_tool_choice(tool_choice, tools)
    names = frozenset(tool_name(tool) for tool in tools)
    template = template_text(tokenizer, template_kwargs)
    if choice.forced:
        syntax = TOOL_SYNTAXES.get(tool_parser or find_tool_syntax(template))
        held, syntax = _held_to(choice, tools, syntax, parallel=parallel)
        held_options = {"structured_outputs": held, **_with_special_tokens(tokenizer, syntax)}
        format = AnswerFormat(syntax, names, choice.name)
        return AnswerPlan(tuple(tools), held_options, format, choice)

    tags = reasoning_tags(reasoning_parser) if reasoning_parser else find_reasoning_tags(template)
    if structured:
        tags = None
    name = (tool_parser or find_tool_syntax(template)) if choice.mode == "auto" else None
    syntax = TOOL_SYNTAXES.get(name) if name else None
    opened = tags is not None and opens_reasoning(tokenizer, tags, template_kwargs)
    format = AnswerFormat(syntax, names, reasoning=tags, reasoning_open=opened)
    theirs = name if syntax is None else None
    special = format.needs_special_tokens or theirs is not None
    options: dict[str, Any] = {"skip_special_tokens": False} if special else {}
    if syntax is not None:
        options |= _with_special_tokens(tokenizer, syntax)
        if strict and syntax.end is not None and not structured:
            options["structured_outputs"], _ = _held_to(choice, tools, syntax, parallel=parallel)
    return AnswerPlan(tuple(tools), options, format, choice, theirs, tokenizer)


def _held_to(
    choice: ToolChoice,
    tools: Sequence[Mapping[str, Any]],
    syntax: ToolSyntax | None,
    *,
    parallel: bool,
) -> tuple[dict[str, Any], ToolSyntax]:
    """What a forced answer is held to, and how to read it: the model's own syntax where we can
    write it, else plain JSON."""
    if syntax is None or syntax.end is None:
        return {"json": calls_schema(choice, tools, parallel=parallel)}, TOOL_SYNTAXES["json"]
    tag = calls_tag(choice, tools, start=syntax.starts[0], end=syntax.end, parallel=parallel)
    return {"structural_tag": tag}, replace(syntax, bare=True)


def _with_special_tokens(tokenizer: Tokenizer | None, syntax: ToolSyntax) -> dict[str, Any]:
    """Keeps the texts around calls in the answer, where they are special tokens."""
    texts = (*syntax.starts, syntax.end or "")
    special = any(is_special(tokenizer, text) for text in texts)
    return {"skip_special_tokens": False} if special else {}
