"""A schema as a user writes it, and prompts that import some of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt import Message, Part, Prompt, Span, Text

__all__ = ["Child", "Module", "Parameter", "Schema", "SchemaPrompt", "Union"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place in a module's text for an argument.

    Args:
        name: of the argument.
        length: tokens that are reserved for it; a longer argument is refused.
        default: what stands there where a prompt gives no argument; None: one must be given.
    """

    name: str
    length: int
    default: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 1:
            raise PromptError(
                f"Parameter {shown(self.name)}: length={shown(self.length)}, at least 1 token"
            )


@dataclass(frozen=True, slots=True, init=False)
class Module:
    """A named piece of a schema: text, parameters, and further modules inside it.

    Args:
        name: unique among its siblings, without "/".
        children: a plain string is one text.
    """

    name: str
    children: tuple[Child, ...]

    def __init__(self, name: str, children: str | Sequence[Child]) -> None:
        if not name or "/" in name:
            raise PromptError(f"A module's name is a word without '/', not {shown(name)}")
        children = (children,) if isinstance(children, str) else tuple(children)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "children", children)
        _check_names(self)


@dataclass(frozen=True, slots=True, init=False)
class Union:
    """Modules of which a prompt imports one at most; they share their positions."""

    members: tuple[Module, ...]

    def __init__(self, members: Iterable[Module]) -> None:
        object.__setattr__(self, "members", tuple(members))
        if not self.members:
            raise PromptError("A union has at least one module")


Child = str | Parameter | Module | Union


@dataclass(frozen=True, slots=True)
class Schema:
    """All that prompts of one kind are made of.

    Args:
        name: for messages.
        children: what every prompt has (text), and what it may import (modules and unions).
        system: the system message, in front of everything.
        scaffolds: sets of module paths, neighbours in the schema, that are computed together in a
            prompt that imports all of a set: they see each other, as in an ordinary prompt.
    """

    name: str
    children: Sequence[Child]
    system: str = ""
    scaffolds: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(self.children))
        object.__setattr__(self, "scaffolds", tuple(map(tuple, self.scaffolds)))
        if any(isinstance(child, Parameter) for child in self.children):
            raise PromptError(f"Schema {shown(self.name)}: parameters belong into a module")
        _check_names(self)
        known = dict(self.modules())
        for path in (path for scaffold in self.scaffolds for path in scaffold):
            if path not in known:
                raise PromptError(
                    f"Schema {shown(self.name)}: scaffold of unknown module {shown(path)}"
                )

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Every module with its path, "outer/inner", in order."""
        yield from _modules(self.children, "")

    def prompt(
        self,
        text: str,
        modules: Mapping[str, Mapping[str, str]] | Iterable[str] = (),
        *,
        chat: bool = True,
    ) -> SchemaPrompt:
        """A prompt that imports modules.

        Args:
            text: what is asked, behind the modules.
            modules: paths, "outer/inner", with the arguments of each; an inner module imports
                the outer ones.
            chat: put it through the model's chat template.

        Raises:
            PromptError: an unknown module or argument, a missing argument, or two modules of one
                union.
        """
        given = dict(modules) if isinstance(modules, Mapping) else {path: {} for path in modules}
        known = dict(self.modules())
        chosen: dict[str, dict[str, str]] = {}
        for path, arguments in given.items():
            if path not in known:
                raise PromptError(
                    f"Schema {shown(self.name)} has no module {shown(path)}; known: "
                    f"{', '.join(known)}"
                )
            parts = path.split("/")
            for end in range(1, len(parts)):
                chosen.setdefault("/".join(parts[:end]), {})
            chosen[path] = {name: str(value) for name, value in arguments.items()}
        for path, arguments in chosen.items():
            _check_arguments(path, known[path], arguments)
        _check_unions(self.children, "", chosen)
        return SchemaPrompt(self, chosen, text, chat=chat)


class SchemaPrompt(Prompt):
    """A prompt over a schema. To any technique but "prompt_cache" it is an ordinary prompt whose
    modules, arguments filled in, are spans."""

    __slots__ = ("arguments", "schema", "text")

    schema: Schema
    arguments: Mapping[str, Mapping[str, str]]
    text: str

    def __init__(
        self,
        schema: Schema,
        arguments: Mapping[str, Mapping[str, str]],
        text: str,
        *,
        chat: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        spans = [Span(part) for part in filled_in(schema, arguments)]
        parts: list[Part] = [*spans, Text(text)]
        if chat:
            system = [Message("system", schema.system)] if schema.system else []
            super().__init__(
                messages=[*system, Message("user", parts)],
                tools=tools,
                template_kwargs=template_kwargs,
            )
        else:
            before: list[Part] = [Text(f"{schema.system}\n\n")] if schema.system else []
            super().__init__([*before, *parts])
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "text", text)

    def with_chat_options(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> SchemaPrompt:
        """The same chat with tools, and variables for the chat template."""
        options: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
        return SchemaPrompt(self.schema, self.arguments, self.text, chat=True, **options)

    def frame(self) -> Prompt:
        """What stands around the modules, a span in their place."""
        middle: list[Part] = [Span(""), Text(self.text)]
        if self.is_chat:
            return Prompt.chat(
                [*self.messages[:-1], Message("user", middle)],
                tools=self.tools,
                template_kwargs=self.template_kwargs,
            )
        before = [part for part in self.parts[:1] if isinstance(part, Text)]
        return Prompt([*before[: bool(self.schema.system)], *middle])


def filled_in(schema: Schema, arguments: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Texts of what a prompt imports, runs of text between modules each by itself."""

    def walk(children: Iterable[Child], path: str) -> Iterator[str]:
        run = ""
        for child in children:
            if isinstance(child, str):
                run += child
            elif isinstance(child, Parameter):
                run += arguments[path].get(child.name, child.default or "")
            else:
                if run.strip():
                    yield run
                run = ""
                for member in child.members if isinstance(child, Union) else (child,):
                    inner = _join(path, member.name)
                    if inner in arguments:
                        yield from walk(member.children, inner)
        if run.strip():
            yield run

    return list(walk(schema.children, ""))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _modules(children: Iterable[Child], path: str) -> Iterator[tuple[str, Module]]:
    for child in children:
        members: tuple[Any, ...] = child.members if isinstance(child, Union) else (child,)
        for member in members:
            if isinstance(member, Module):
                inner = _join(path, member.name)
                yield inner, member
                yield from _modules(member.children, inner)


def _check_names(owner: Module | Schema) -> None:
    names: list[str] = []
    parameters: list[str] = []
    for child in owner.children:
        if isinstance(child, Parameter):
            parameters.append(child.name)
        elif isinstance(child, Module):
            names.append(child.name)
        elif isinstance(child, Union):
            names += [member.name for member in child.members]
        elif not isinstance(child, str):
            raise PromptError(
                f"{shown(owner.name)} holds text, Parameter, Module and Union, not {shown(child)}"
            )
    for kind, found in (("module", names), ("parameter", parameters)):
        if twice := [name for name in found if found.count(name) > 1]:
            raise PromptError(f"{shown(owner.name)} has two {kind}s named {shown(twice[0])}")


def _check_arguments(path: str, module: Module, arguments: Mapping[str, str]) -> None:
    parameters = {child.name: child for child in module.children if isinstance(child, Parameter)}
    if unknown := sorted(set(arguments) - set(parameters)):
        raise PromptError(f"Module {shown(path)} has no parameter {shown(unknown[0])}")
    for name, parameter in parameters.items():
        if name not in arguments and parameter.default is None:
            raise PromptError(f"Module {shown(path)} needs an argument {shown(name)}")


def _check_unions(
    children: Iterable[Child], path: str, chosen: Mapping[str, Mapping[str, str]]
) -> None:
    for child in children:
        if isinstance(child, Union):
            both = [m.name for m in child.members if _join(path, m.name) in chosen]
            if len(both) > 1:
                raise PromptError(f"Modules {' and '.join(both)} exclude each other: a union")
        for member in getattr(child, "members", (child,)):
            if isinstance(member, Module):
                _check_unions(member.children, _join(path, member.name), chosen)
