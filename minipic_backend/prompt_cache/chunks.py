"""A schema in tokens: chunks at reserved positions, and the places of parameters in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt_cache.schema import Child, Module, Parameter, Schema, Union

__all__ = ["Chunk", "Slot", "schema_chunks", "with_scaffolds"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's tokens [start, end) in its chunk, counted behind the marker."""

    parameter: Parameter
    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of text and parameters: one span.

    Args:
        path: of the module that it belongs to; "" is the schema itself.
        offset: position of its marker, counted from the schema's start; its tokens follow.
        token_ids: without marker.
        slots: of its parameters, in order.
    """

    path: str
    offset: int
    token_ids: tuple[int, ...]
    slots: tuple[Slot, ...] = ()

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.offset + 1 + len(self.token_ids)


@dataclass(slots=True)
class _Walk:
    encode: Callable[[str], list[int]]
    filler: int
    chunks: list[Chunk] = field(default_factory=list)

    def over(self, children: Iterable[Child], path: str, offset: int) -> int:
        """Adds the chunks of `children` from `offset` on; the position behind them."""
        ids: list[int] = []
        slots: list[Slot] = []

        def flush() -> None:
            nonlocal offset, ids, slots
            if ids:
                self.chunks.append(Chunk(path, offset, tuple(ids), tuple(slots)))
                offset += 1 + len(ids)
            ids, slots = [], []

        for child in children:
            if isinstance(child, str):
                ids += self.encode(child)
            elif isinstance(child, Parameter):
                reserved = self._reserved(child, path)
                slots.append(Slot(child, path, len(ids), len(ids) + child.length))
                ids += reserved
            else:
                flush()
                members = child.members if isinstance(child, Union) else (child,)
                offset = max(self._module(member, path, offset) for member in members)
        flush()
        return offset

    def _module(self, module: Module, path: str, offset: int) -> int:
        inner = f"{path}/{module.name}" if path else module.name
        return self.over(module.children, inner, offset)

    def _reserved(self, parameter: Parameter, path: str) -> list[int]:
        ids = self.encode(parameter.default) if parameter.default else []
        if len(ids) > parameter.length:
            raise PromptError(
                f"The default of {path}'s {shown(parameter.name)} has {len(ids)} tokens; "
                f"{parameter.length} are reserved"
            )
        return ids + [self.filler] * (parameter.length - len(ids))


def schema_chunks(
    schema: Schema, encode: Callable[[str], list[int]], filler: int
) -> tuple[Chunk, ...]:
    """Every chunk of a schema, in order; those of a union's modules start at one position.

    Args:
        schema: as the user wrote it.
        encode: token ids of a text, special tokens off.
        filler: token that fills a parameter's reserved range.
    """
    walk = _Walk(encode, filler)
    walk.over(schema.children, "", 0)
    return tuple(walk.chunks)


def with_scaffolds(
    chunks: Sequence[Chunk], scaffolds: Iterable[Sequence[str]], filler: int
) -> list[Chunk]:
    """Imported chunks, those of each scaffold that is imported as a whole joined to one.

    Raises:
        PromptError: modules of a scaffold that are not neighbours.
    """
    result = list(chunks)
    for scaffold in scaffolds:
        own = [index for index, chunk in enumerate(result) if chunk.path in scaffold]
        if {result[index].path for index in own} < set(scaffold) or not own:
            continue
        group = result[own[0] : own[-1] + 1]
        if len(group) != len(own) or any(a.end != b.offset for a, b in pairwise(group)):
            raise PromptError(
                f"The modules of scaffold {', '.join(scaffold)} are not neighbours in this prompt"
            )
        result[own[0] : own[-1] + 1] = [_joined(group, filler)]
    return result


def _joined(group: Sequence[Chunk], filler: int) -> Chunk:
    """One chunk; a filler stands where the later ones had their markers."""
    first, *others = group
    for chunk in others:
        behind = len(first.token_ids) + 1
        slots = [replace(s, start=s.start + behind, end=s.end + behind) for s in chunk.slots]
        first = replace(
            first,
            token_ids=(*first.token_ids, filler, *chunk.token_ids),
            slots=(*first.slots, *slots),
        )
    return first
