"""Schemas and prompts in Prompt Cache's own markup, PML.

<schema name="trip">
  <system>You plan trips.</system>
  <module name="plan">A trip of <parameter name="days" length="4"/> days.
    <union><module name="miami">…</module><module name="paris">…</module></union>
  </module>
</schema>

<prompt schema="trip"><plan days="three"><miami/></plan>Where to surf?</prompt>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt_cache.schema import (
    Child,
    Module,
    Parameter,
    Schema,
    SchemaPrompt,
    Union,
)

__all__ = ["read_pml_prompt", "read_pml_schema"]

_ENDS = re.compile(r"^\s+|\s+$")
_ROLES = ("user", "assistant")
"""Tags of a conversation that only wrap what is inside: the chat template takes their place."""


def read_pml_schema(text: str) -> Schema:
    """A schema from PML.

    Raises:
        PromptError: no well-formed XML, or an element where there may be none.
    """
    root = _parse(text, "schema")
    system = root.find("system")
    if system is not None and len(system):
        raise PromptError("PML: <system> holds text only")
    scaffolds: list[list[str]] = []
    children = _children(root, "", scaffolds)
    written = "" if system is None else _compact(system.text).strip()
    return Schema(_attribute(root, "name"), children, written, scaffolds)


def read_pml_prompt(text: str, schemas: Mapping[str, Schema] | Schema) -> SchemaPrompt:
    """A prompt from PML.

    Args:
        text: the markup.
        schemas: by name, or the one that it uses.

    Raises:
        PromptError: no well-formed XML, an unknown schema, or what `Schema.prompt` refuses.
    """
    root = _parse(text, "prompt")
    name = root.get("schema", "")
    schema = schemas if isinstance(schemas, Schema) else schemas.get(name)
    if schema is None or (name and name != schema.name):
        raise PromptError(f"PML: no schema {shown(name)}")
    known = dict(schema.modules())
    arguments: dict[str, dict[str, str]] = {}
    asked = [root.text or ""]

    def take(element: ElementTree.Element, path: str) -> None:
        inner = f"{path}/{element.tag}" if path else element.tag
        arguments[inner] = dict(element.attrib)
        if (element.text or "").strip():
            raise PromptError(f"PML: text inside <{element.tag}>, which imports a module")
        for child in element:
            take(child, inner)

    for element in root:
        if element.tag in _ROLES and element.tag not in known:
            asked.append("".join(element.itertext()))
        else:
            take(element, "")
        asked.append(element.tail or "")
    return schema.prompt(_compact(" ".join(asked)).strip(), arguments)


def _children(root: ElementTree.Element, path: str, scaffolds: list[list[str]]) -> list[Child]:
    found: list[Child] = []
    if compact := _compact(root.text):
        found.append(compact)
    for element in root:
        if element.tag == "module":
            found.append(_module(element, path, scaffolds))
        elif element.tag == "union":
            if any(member.tag != "module" for member in element):
                raise PromptError("PML: <union> holds modules only")
            found.append(Union(_module(member, path, scaffolds) for member in element))
        elif element.tag == "parameter":
            found.append(_parameter(element))
        elif element.tag == "scaffold":
            scaffolds.append([name.strip() for name in _attribute(element, "modules").split(",")])
        elif element.tag in _ROLES:
            found += _children(element, path, scaffolds)
        elif element.tag != "system":
            raise PromptError(f"PML: <{element.tag}> in a schema")
        if compact := _compact(element.tail):
            found.append(compact)
    return found


def _module(element: ElementTree.Element, path: str, scaffolds: list[list[str]]) -> Module:
    name = _attribute(element, "name")
    return Module(name, _children(element, f"{path}/{name}" if path else name, scaffolds))


def _parameter(element: ElementTree.Element) -> Parameter:
    length = _attribute(element, "length")
    if not length.isdecimal():
        raise PromptError(f"PML: length={shown(length)}, a number of tokens")
    return Parameter(_attribute(element, "name"), int(length), element.get("scaffold"))


def _attribute(element: ElementTree.Element, name: str) -> str:
    value = element.get(name)
    if not value:
        raise PromptError(f"PML: <{element.tag}> without {name}")
    return value


def _compact(text: str | None) -> str:
    """White space at either end is one space, and nothing if that is all."""
    return _ENDS.sub(" ", text) if text and text.strip() else ""


def _parse(text: str, tag: str) -> ElementTree.Element:
    if "<!" in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL):
        raise PromptError("PML: no declarations (<!…), please")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise PromptError(f"PML: {error}") from error
    if root.tag != tag:
        raise PromptError(f"PML: <{root.tag}> where <{tag}> should be")
    return root
