"""The chat model's tools and structured output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable

from langchain_minipic._tools import (
    Schema,
    StructuredMethod,
    ToolLike,
    output_parser,
    response_format,
    titled,
    tool_dicts,
    with_parsing,
)
from minipic_backend import ConfigurationError
from minipic_backend.errors import shown
from minipic_backend.tools import resolve_tool_choice

__all__ = ["ToolCalling"]


class ToolCalling(BaseChatModel):
    """Binds tools and schemas as options of the call."""

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools.

        Args:
            tools: functions, `BaseTool`s, classes, or dicts in OpenAI's form.
            tool_choice: None or "auto": the model decides; "none"; "any", "required" or True: it
                calls at least one; a tool's name: it calls that one. What is forced is forced by
                constrained decoding: the arguments then match the tool's schema, unless
                `max_tokens` cuts them off.
            parallel_tool_calls: False: a forced answer holds one call.
            strict: calls that the model makes of its own accord match a tool's schema, too, where
                its syntax is Hermes'.
            kwargs: further options of the call.

        Raises:
            ConfigurationError: an unknown tool or choice.
        """
        given = tool_dicts(tools)
        resolve_tool_choice(tool_choice, given)  # a wrong one fails here, not at the first call
        chosen = {
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "strict": strict,
        }
        bound = {name: value for name, value in chosen.items() if value is not None}
        return self.bind(tools=given, **bound, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: StructuredMethod = "json_schema",
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model, giving objects.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema. None: any JSON object
                ("json_mode" only).
            method: "json_schema" and "json_mode" hold the answer to the schema by constrained
                decoding (without a schema: to JSON); "function_calling" asks for it as the
                arguments of a tool, which the prompt then describes.
            include_raw: give {"raw": message, "parsed": object, "parsing_error": error or None}.
            kwargs: further options of the call; `strict` is always meant.

        Raises:
            ConfigurationError: an unknown method, or no schema where one is needed.
        """
        if method not in get_args(StructuredMethod) or (schema is None and method != "json_mode"):
            known = ", ".join(get_args(StructuredMethod))
            raise ConfigurationError(
                f"with_structured_output: method={shown(method)}, schema={shown(schema)}; methods "
                f"are {known}, and only json_mode does without a schema"
            )
        schema = titled(schema)
        trace = {"kwargs": {"method": method}, "schema": schema}
        if method == "function_calling":
            assert schema is not None
            llm = self.bind_tools(
                [schema], tool_choice="any", ls_structured_output_format=trace, **kwargs
            )
        else:
            llm = self.bind(
                response_format=response_format(schema),
                ls_structured_output_format=trace,
                **kwargs,
            )
        return with_parsing(llm, output_parser(schema, method), include_raw=include_raw)
