"""How a model family writes tool calls and reasoning, and how its chat template gives it away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.layout.tokenizer import Tokenizer, chat_templates

__all__ = [
    "HERMES",
    "REASONING_TAGS",
    "TOOL_SYNTAXES",
    "ReasoningTags",
    "ToolSyntax",
    "find_reasoning_tags",
    "find_tool_syntax",
    "is_special",
    "opens_reasoning",
    "template_text",
]


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Tool calls as JSON objects, one or a list of them.

    Args:
        starts: any of these texts begins a call (or a list of calls).
        end: closes it; None where nothing does.
        bare: JSON at the very start of the answer is a call too.
        special: the texts are special tokens, which the engine must not drop from the answer.
        names_key, arguments_keys: keys of the tool's name and of its arguments.
    """

    starts: tuple[str, ...] = ()
    end: str | None = None
    bare: bool = False
    special: bool = False
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")


HERMES = ToolSyntax(("<tool_call>",), "</tool_call>")
"""Hermes, Qwen, SmolLM and what else was taught on their format; ours for templates without."""

TOOL_SYNTAXES: Mapping[str, ToolSyntax] = {
    "hermes": HERMES,
    "mistral": ToolSyntax(("[TOOL_CALLS]",), special=True),
    "llama3_json": ToolSyntax(("<|python_tag|>",), bare=True, special=True),
    "granite": ToolSyntax(("<|tool_call|>", "<tool_call>"), bare=True, special=True),
    "phi4_mini_json": ToolSyntax(("functools",), bare=True),
    "json": ToolSyntax(bare=True),
}
"""By the names that vLLM gives to its parsers."""

# A text of the chat template that tells a family, the more telling ones first. Names that are
# not in TOOL_SYNTAXES are parsers of vLLM's.
_SIGNS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),  # noqa: RUF001 - their bars
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("functools", "phi4_mini_json"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What stands around reasoning."""

    start: str
    end: str
    special: bool = False


REASONING_TAGS: Mapping[str, ReasoningTags] = {
    "think": ReasoningTags("<think>", "</think>"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", special=True),
}


def is_special(tokenizer: Tokenizer | None, text: str) -> bool:
    """Whether a text is a special token, which engines leave out of an answer's text."""
    tokens = tokenizer.added_tokens_decoder.values() if tokenizer is not None else ()
    return any(token.special and token.content == text for token in tokens)


def template_text(tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any]) -> str:
    """Every chat template that may come to be used, joined; empty where there is none."""
    override = template_kwargs.get("chat_template")
    if isinstance(override, str):
        return override
    return "\n".join(chat_templates(tokenizer)) if tokenizer is not None else ""


def find_tool_syntax(template: str) -> str:
    """Name of the syntax that a chat template teaches; "hermes" where it teaches none."""
    if "tools" not in template:
        return "hermes"
    return next((name for sign, name in _SIGNS if sign in template), "hermes")


def find_reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags that a chat template knows."""
    return next((tags for tags in REASONING_TAGS.values() if tags.end in template), None)


def reasoning_tags(name: str) -> ReasoningTags:
    """Tags by the name of their family.

    Raises:
        ConfigurationError: unknown name.
    """
    if name not in REASONING_TAGS:
        raise ConfigurationError(
            f"reasoning_parser={shown(name)}: choose one of {', '.join(REASONING_TAGS)}, or None"
        )
    return REASONING_TAGS[name]


def opens_reasoning(
    tokenizer: Tokenizer | None, tags: ReasoningTags, template_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the template's last words start the reasoning, so that the answer lacks the tag."""
    if tokenizer is None:
        return False
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}],
            **{**template_kwargs, "tokenize": False, "add_generation_prompt": True},
        )
    except Exception:  # a template that wants more than this; the prompt itself will say so
        return False
    return str(text).rstrip().endswith(tags.start)
