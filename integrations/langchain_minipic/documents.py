"""What counts as documents among the values of a prompt's variables, and what they read as."""

from __future__ import annotations

from collections import ChainMap, UserDict, UserString
from collections.abc import Collection, Iterable, Mapping, MappingView, Sequence, Set
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsFloat

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate, format_document
from langchain_core.prompts.string import StringPromptTemplate

from langchain_minipic._marks import split_marked, unmark
from minipic_backend import PromptError, Span
from minipic_backend.errors import shown

__all__ = [
    "DocumentLike",
    "DocumentText",
    "Unranked",
    "document_name",
    "document_texts",
    "each_document",
    "example_documents",
    "find_documents",
    "holds_documents",
    "is_mapping",
    "listed",
    "marked_documents",
    "read_document",
]

# Sequences, of what are no documents.
_OTHERS = str | bytes | bytearray | memoryview | range | UserString

# Mappings whose values are at hand; reading those of others may cost anything.
_MAPPINGS = (dict, UserDict, ChainMap, MappingProxyType)

DocumentLike = Document | Span | str | tuple[Document, float]


class Unranked(list[Document]):
    """Documents whose order says nothing about relevance: none of them is ever late."""


class DocumentText(NamedTuple):
    """A document as it stands in the prompt."""

    text: str
    rank: int | None
    id: str | None


def find_documents(value: Any) -> Sequence[Document | Span] | None:
    """The documents that `value` is: one, or a collection of them, with or without scores. Spans,
    as `rank_spans` returns them, are documents too.

    None where `value` is something else; an empty list counts as a list of no documents.

    Raises:
        PromptError: a list with documents and other things in it, or documents without an order.
    """
    if (document := _one(value)) is not None:
        return [document]
    if (items := listed(value)) is None:
        return None
    found = [_one(item) for item in items]
    documents = [one for one in found if isinstance(one, Document)]
    spans = [one for one in found if isinstance(one, Span)]
    unordered = isinstance(value, Set) and not isinstance(value, MappingView | Sequence)
    if not (documents or spans):
        return None if found or unordered else documents
    if unordered:
        raise PromptError(
            f"A {type(value).__name__} of documents has no order: give a list, the best first, or "
            "Unranked([...])"
        )
    if None in found:
        place = found.index(None)
        raise PromptError(
            f"Element {place} of a list of documents is not a Document but "
            f"{type(items[place]).__name__}: {shown(items[place])}"
        )
    if documents and spans:
        raise PromptError(
            "A list holds Documents and Spans, and a Span's rank is its own: give one kind"
        )
    return documents or spans


def holds_documents(value: Any) -> bool:
    """Whether a document or Span is anywhere in nested collections."""
    pending = [value]
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id comes again
    while pending:
        item = pending.pop()
        if isinstance(item, Document | Span):
            return True
        if isinstance(item, str | int | float) or id(item) in seen:
            continue
        seen[id(item)] = item
        if is_mapping(item):
            pending += [*item.keys(), *item.values()]
        else:
            pending += listed(item) or ()
    return False


def is_mapping(value: Any) -> bool:
    """Whether this is a dict, or one of the standard library's other mappings."""
    return isinstance(value, _MAPPINGS)


def listed(value: Any) -> Sequence[Any] | None:
    """What a collection that may hold documents has in it: a list, a deque, a dict's values, an
    array. None where `value` is none, or is used up by looking into it."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping | _OTHERS) or not isinstance(value, Collection):
        return None
    items: Collection[Any] = value
    if isinstance(value, Sequence | Set | MappingView):
        return list(items)
    with suppress(TypeError):  # an array without a dimension, say
        if _one(next(iter(items), None)) is not None:
            return list(items)
    return None


def read_document(
    document: Document | Span | str,
    template: StringPromptTemplate | None = None,
    rank: int | None = None,
) -> DocumentText:
    """Text of a document: its `page_content`, or `template` over content and metadata. A text is
    taken as it is, and so is a Span, with a rank of its own.

    Raises:
        PromptError: `page_content` is not a str.
        ValueError: the template asks for metadata that the document lacks.
    """
    if isinstance(document, Span):
        return DocumentText(document.text, document.rank, document.id)
    if isinstance(document, str):
        return DocumentText(document, rank, None)
    if not isinstance(document.page_content, str):
        raise PromptError(
            "A document's page_content must be a str, not "
            f"{type(document.page_content).__name__}: {shown(document.page_content)}"
        )
    text = document.page_content if template is None else format_document(document, template)
    return DocumentText(unmark(text), rank, document_name(document))


def document_name(document: Document) -> str | None:
    """What a document is called: its id, or that in its metadata, or its source."""
    name = document.id or document.metadata.get("id") or document.metadata.get("source")
    return None if name is None else str(name)


def marked_documents(text: str) -> list[str | Document]:
    """A text with marks of `SpanDocumentPrompt` in it, in pieces."""
    return [Document(piece) if is_span else piece for piece, is_span in split_marked(text)]


def example_documents(
    examples: Iterable[Mapping[str, Any]], example_prompt: StringPromptTemplate | str
) -> Unranked:
    """Few-shot examples as documents: each is a span of its own, cached however they are chosen.

    examples = example_documents(selector.select_examples({"question": q}), "Q: {q}\\nA: {a}")
    prompt.partial(examples=examples)
    """
    if isinstance(example_prompt, str):
        example_prompt = PromptTemplate.from_template(example_prompt)
    return Unranked(Document(example_prompt.format(**example)) for example in examples)


def document_texts(
    documents: Iterable[DocumentLike] | Document | Span | str,
    template: StringPromptTemplate | None = None,
) -> list[str]:
    """Texts of documents, or of one; strings and Spans are taken as they are.

    Raises:
        PromptError: an element is neither a document, nor a Span, nor a str.
    """
    return [read_document(one, template).text for one in each_document(documents)]


def each_document(
    documents: Iterable[DocumentLike] | Document | Span | str,
) -> list[Document | Span | str]:
    """Documents, without their scores, Spans and texts; one of them counts as a list.

    Raises:
        PromptError: an element is none of them.
    """
    if isinstance(documents, Document | Span | str):
        return [documents]
    found: list[Document | Span | str] = []
    for place, item in enumerate(documents):
        one = item if isinstance(item, str) else _one(item)
        if one is None:
            raise PromptError(
                f"Element {place} is neither a Document nor a str but {type(item).__name__}: "
                f"{shown(item)}"
            )
        found.append(one)
    return found


def _one(value: Any) -> Document | Span | None:
    """`value` as a document; similarity searches also give (document, score)."""
    if isinstance(value, Document | Span):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Document):
        return value[0] if isinstance(value[1], SupportsFloat) else None
    return None
