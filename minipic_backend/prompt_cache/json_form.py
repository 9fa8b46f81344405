"""Schemas and their prompts as JSON values, for frameworks whose messages hold nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt_cache.schema import (
    Child,
    Module,
    Parameter,
    Schema,
    SchemaPrompt,
    Union,
)

__all__ = ["prompt_from_json", "prompt_to_json"]


def prompt_to_json(prompt: SchemaPrompt) -> dict[str, Any]:
    """What `prompt_from_json` makes the same prompt of."""
    schema = prompt.schema
    return {
        "schema": {
            "name": schema.name,
            "system": schema.system,
            "children": [_to_json(child) for child in schema.children],
            "scaffolds": [list(paths) for paths in schema.scaffolds],
        },
        "modules": {path: dict(arguments) for path, arguments in prompt.arguments.items()},
        "text": prompt.text,
    }


def prompt_from_json(value: Any) -> SchemaPrompt:
    """A chat's prompt.

    Raises:
        PromptError: something that `prompt_to_json` does not write, or a schema that is wrong.
    """
    try:
        given = value["schema"]
        children = [_from_json(child) for child in given["children"]]
        schema = Schema(given["name"], children, given["system"], given["scaffolds"])
        return schema.prompt(value["text"], value["modules"])
    except (KeyError, TypeError, AttributeError) as error:
        raise PromptError(f"Not a schema's prompt: {shown(value)}") from error


def _to_json(child: Child) -> str | dict[str, Any]:
    if isinstance(child, str):
        return child
    if isinstance(child, Parameter):
        return {"parameter": child.name, "length": child.length, "default": child.default}
    if isinstance(child, Module):
        return {"module": child.name, "children": [_to_json(one) for one in child.children]}
    return {"union": [_to_json(member) for member in child.members]}


def _from_json(value: str | Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return value
    if "parameter" in value:
        return Parameter(value["parameter"], value["length"], value["default"])
    if "module" in value:
        return Module(value["module"], [_from_json(one) for one in value["children"]])
    return Union([_from_json(member) for member in value["union"]])
