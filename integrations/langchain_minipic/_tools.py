"""Tools and structured output in LangChain's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import (
    InvalidToolCall,
    ToolCall,
    ToolCallChunk,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from minipic_backend import AnswerError, ConfigurationError
from minipic_backend.errors import shown
from minipic_backend.tools import Answer, AnswerDelta

__all__ = [
    "Schema",
    "StructuredMethod",
    "ToolLike",
    "call_chunks",
    "calls",
    "constraint",
    "output_parser",
    "response_format",
    "titled",
    "tool_dicts",
    "with_parsing",
]

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool
Schema = dict[str, Any] | type
StructuredMethod = Literal["json_schema", "json_mode", "function_calling"]


def tool_dicts(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tools of any kind that LangChain knows, in OpenAI's form."""
    return [convert_to_openai_tool(tool) for tool in tools]


def calls(answer: Answer) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Calls whose arguments are a JSON object, and the others."""
    good: list[ToolCall] = []
    bad: list[InvalidToolCall] = []
    for call in answer.tool_calls:
        try:
            good.append(tool_call(name=call.name, args=call.parse_arguments(), id=call.id))
        except AnswerError as error:
            bad.append(
                invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=str(error))
            )
    return good, bad


def call_chunks(delta: AnswerDelta) -> list[ToolCallChunk]:
    """Pieces of calls, for a chunk of a stream."""
    return [
        tool_call_chunk(name=piece.name, args=piece.arguments, id=piece.id, index=piece.index)
        for piece in delta.tool_calls
    ]


def titled(schema: Schema | None) -> Schema | None:
    """A JSON schema with the title that LangChain wants of it."""
    if not isinstance(schema, dict) or {"title", "name", "function"} & schema.keys():
        return schema
    return {"title": "answer", **schema}


def response_format(schema: Schema | None) -> dict[str, Any]:
    """What the answer is held to, in OpenAI's form."""
    if schema is None:
        return {"type": "json_object"}
    converted = convert_to_json_schema(schema)
    name = converted.get("title", "answer")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": converted}}


def constraint(format: object) -> dict[str, Any]:
    """Sampling options for a `response_format`.

    Raises:
        ConfigurationError: none that we know.
    """
    kind = format.get("type") if isinstance(format, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if kind == "json_schema" and isinstance(format, Mapping):
        inner = format.get("json_schema")
        if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
            return {"structured_outputs": {"json": dict(inner["schema"])}}
    raise ConfigurationError(
        "response_format is {'type': 'json_schema', 'json_schema': {'name': …, 'schema': …}}, "
        f"{{'type': 'json_object'}} or {{'type': 'text'}}, not {shown(format)}"
    )


def output_parser(schema: Schema | None, method: StructuredMethod) -> OutputParserLike[Any]:
    """From an answer to what the caller asked for."""
    model = _pydantic(schema)
    if method != "function_calling":
        return JsonOutputParser() if model is None else PydanticOutputParser(pydantic_object=model)
    if schema is None:
        raise ConfigurationError("with_structured_output(method='function_calling') needs a schema")
    if model is not None:
        return PydanticToolsParser(tools=[model], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _pydantic(schema: Schema | None) -> Any:
    """The schema where it is a pydantic class, of either generation."""
    return schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None


def with_parsing(
    llm: Runnable[LanguageModelInput, Any], parser: OutputParserLike[Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`llm | parser`, or {"raw", "parsed", "parsing_error"}."""
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
