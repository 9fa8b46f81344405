"""How one message template keeps documents whole.

Each value that is documents goes through the template's own formatting as a slot, whatever the
template language, and comes out as marked blocks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NoReturn, Self

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.prompts.message import BaseMessagePromptTemplate
from langchain_core.prompts.string import StringPromptTemplate
from pydantic import BaseModel, ConfigDict, model_validator

from langchain_minipic._marks import is_marked
from langchain_minipic._slots import Slots
from langchain_minipic.documents import (
    DocumentText,
    Unranked,
    document_name,
    find_documents,
    holds_documents,
    is_mapping,
    listed,
    marked_documents,
    read_document,
)
from langchain_minipic.messages import span_block
from minipic_backend import ConfigurationError, PromptError, Span
from minipic_backend.errors import shown

__all__ = ["DocumentOptions", "KeepsDocuments"]

_CONTENT = "page_content"
_IS_NONE = "None would be read as that word: a retriever that found nothing gives an empty list"
_NO_DOCUMENT = "documents are langchain_core's Document(page_content, metadata=…), not {}"
_NO_LIST = "documents are given as a list, not as a {}"
_EMPTY = (
    "a list of documents is empty: nothing was retrieved? Set allow_empty=True on the prompt to "
    "send it without documents"
)
_NESTED = (
    "documents inside a {} would be printed in Python's notation: give the documents alone, as a "
    "list of Document or Span, the best first, or of (document, score)"
)
_NO_ORDER = (
    "a {} has no order, and would read differently from one process to the next: give a list, such "
    "as sorted(…)"
)

# Arguments of `read_document`, which runs only for what the template prints.
_Pending = tuple[Document, StringPromptTemplate | None, int | None]
_Slots = Slots[list[_Pending]]
_Pieces = list[str | list[DocumentText]]


class DocumentOptions(BaseModel):
    """How documents stand in a prompt.

    Args:
        document_prompt: a template over `page_content` and metadata; default: the content alone.
        document_separator: whitespace between documents.
        ranked: a list's order is an order of relevance, the best first, as retrievers give it;
            documents may then be put in that order, the best one last (`best_last`), and the best
            be computed in full context (`late`). False where it is not: parts of a text in its
            order, say.
        order: "given", or "id": a list is put in the order of the documents' ids (their texts,
            where they have none), so that the same documents give the same prompt and its plain
            prefix is a hit too. Ranks stay those of the given order, in which technique "primed"
            puts them again: give the model `best_last=False`, or say `ranked=False` here.
        allow_empty: an empty list reads as nothing. By default it is refused, because a model
            asked to answer from documents invents some where it gets none.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    document_prompt: StringPromptTemplate | None = None
    document_separator: str = "\n\n"
    ranked: bool = True
    order: Literal["given", "id"] = "given"
    allow_empty: bool = False

    @model_validator(mode="after")
    def _check_separator(self) -> Self:
        if self.document_separator.strip():
            raise ConfigurationError(
                f"document_separator={shown(self.document_separator)} must be whitespace, so that "
                "a document is the same span wherever it stands; use document_prompt"
            )
        return self

    def _document_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DocumentOptions.model_fields}


class KeepsDocuments(DocumentOptions, BaseMessagePromptTemplate):
    """Mixed into a message template of LangChain's."""

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langchain_minipic", "prompts"]

    def format(self, **kwargs: Any) -> BaseMessage:
        """The message; its content is a list of blocks where documents are in it."""
        slots = _Slots()
        message = super().format(**self._wrap(kwargs, slots))  # type: ignore[misc]  # mixin
        return self._unwrap(message, slots)

    async def aformat(self, **kwargs: Any) -> BaseMessage:
        """`format`, for templates that are formatted asynchronously."""
        slots = _Slots()
        message = await super().aformat(**self._wrap(kwargs, slots))  # type: ignore[misc]  # mixin
        return self._unwrap(message, slots)

    def _wrap(self, values: Mapping[str, Any], slots: _Slots) -> dict[str, Any]:
        prompt = getattr(self, "prompt", None)
        partials = getattr(prompt, "partial_variables", {})
        inner = {name: v() if callable(v) else v for name, v in partials.items()}
        tested = _tested_for_none(prompt)
        return {
            name: self._wrap_variable(name, value, slots, keep_none=name in tested)
            for name, value in {**inner, **values}.items()
        }

    def _wrap_variable(self, name: str, value: Any, slots: _Slots, *, keep_none: bool) -> Any:
        if isinstance(value, set | frozenset) and not holds_documents(value):
            return _RefusedSet(value, _refusal(name, _NO_ORDER.format(type(value).__name__)))
        return self._wrap_value(name, value, slots, keep_none=keep_none)

    def _wrap_value(self, name: str, value: Any, slots: _Slots, *, keep_none: bool = False) -> Any:
        """What stands for the value of a variable, or for something inside it."""
        if value is None:
            return None if keep_none else _Nothing(_refusal(name, _IS_NONE))
        if isinstance(value, dict) or (is_mapping(value) and holds_documents(value)):
            return self._wrap_mapping(name, value, slots, keep_none=keep_none)
        if isinstance(value, str) and is_marked(value):
            return self._wrap_marked(value, slots)
        try:
            documents = find_documents(value)
            if documents is None:
                if holds_documents(value):
                    return self._wrap_nested(name, value, slots)
                return _unless_mistaken(name, value)
            if not documents:
                if self.allow_empty:
                    return ""
                return _Refused(_refusal(name, _EMPTY))
            if isinstance(value, Document | Span):
                return _OneDocument(self._pending(documents[0], None), slots)
            ranked = self.ranked and not isinstance(value, Unranked)
            pending = [
                self._pending(document, rank if ranked else None)
                for rank, document in enumerate(documents)
            ]
            if self.order == "id":
                pending.sort(key=lambda one: (document_name(one[0]) or "", one[0].page_content))
            items = [_OneDocument(one, slots) for one in pending]
            return _Documents(items, slots.add(pending))
        except PromptError as error:
            # The template may not use this variable at all.
            return _Refused(_refusal(name, str(error)))

    def _pending(self, document: Document | Span, rank: int | None) -> _Pending:
        if isinstance(document, Span):  # a text as it is to stand there
            return Document(document.text, id=document.id), None, document.rank
        return document, self.document_prompt, rank

    def _wrap_mapping(
        self, name: str, value: Mapping[Any, Any], slots: _Slots, *, keep_none: bool
    ) -> dict[Any, Any]:
        inside = {
            key: self._wrap_value(name, item, slots, keep_none=keep_none)
            for key, item in value.items()
        }
        if _CONTENT in value:
            return _RefusedDict(inside, _refusal(name, _NO_DOCUMENT.format("a dict")))
        if holds_documents(value):
            return _RefusedDict(inside, _refusal(name, _NESTED.format(type(value).__name__)))
        return inside

    def _wrap_nested(self, name: str, value: Any, slots: _Slots) -> _RefusedList:
        """Documents deeper in a collection: a template may reach them, but not print it."""
        items = []
        for item in listed(value) or ():
            if _is_mixed(item):
                item = self._wrap_nested(name, item, slots)
            elif holds_documents(item):
                item = self._wrap_value(name, item, slots)
            items.append(item)
        return _RefusedList(items, _refusal(name, _NESTED.format(type(value).__name__)))

    def _wrap_marked(self, text: str, slots: _Slots) -> str:
        """Documents that some chain joined to a string."""
        rank = -1
        pieces = []
        for piece in marked_documents(text):
            if isinstance(piece, Document):
                rank += 1
                piece = slots.add([(piece, None, rank if self.ranked else None)])
            pieces.append(piece)
        return "".join(pieces)

    def _unwrap(self, message: BaseMessage, slots: _Slots) -> BaseMessage:
        if not slots.occurs_in(message.content):
            return message
        old = [message.content] if isinstance(message.content, str) else message.content
        content: list[str | dict[str, Any]] = []
        for block in old:
            text = block if isinstance(block, str) else block.get("text")
            if not slots.occurs_in(block):
                content.append(block)
            elif not isinstance(text, str):
                raise PromptError(f"Documents cannot stand in a block of this kind: {shown(block)}")
            elif isinstance(block, str) or set(block) <= {"type", "text"}:
                content.extend(self._blocks(_read(slots, text)))
            else:  # marked by the user: one block, the documents as text inside it
                content.append({**block, "text": self._plain(_read(slots, text))})
        return message.model_copy(update={"content": content})

    def _plain(self, pieces: _Pieces) -> str:
        return "".join(
            piece
            if isinstance(piece, str)
            else self.document_separator.join(document.text for document in piece)
            for piece in pieces
        )

    def _blocks(self, pieces: _Pieces) -> list[dict[str, Any]]:
        """Text and marked blocks. Whitespace joins the block before it: some models refuse
        blocks of nothing else. In front of all, it joins the first, but does not indent it: a
        document reads the same in every place."""
        blocks: list[dict[str, Any]] = []
        lead = ""

        def add(block: dict[str, Any]) -> None:
            nonlocal lead
            if block["text"].strip():
                front = lead[: lead.rfind("\n") + 1] if "extras" in block else lead
                blocks.append({**block, "text": front + block["text"]})
                lead = ""
            elif blocks:
                blocks[-1]["text"] += block["text"]
            else:
                lead += block["text"]

        for piece in pieces:
            if isinstance(piece, str):
                add({"type": "text", "text": piece})
                continue
            for place, document in enumerate(piece):
                add(span_block(document.text, rank=document.rank, id=document.id))
                if place < len(piece) - 1:
                    add({"type": "text", "text": self.document_separator})
        return blocks or [{"type": "text", "text": lead}]


def _read(slots: _Slots, text: str) -> _Pieces:
    return [
        piece if isinstance(piece, str) else [read_document(*pending) for pending in piece]
        for piece in slots.split(text)
    ]


class _Slot:
    """Shared by the values below: any way of printing one gives its slot."""

    # Mustache would otherwise replace a value that is falsy by an empty string, unseen.
    _CHEVRON_return_scope_when_falsy = True
    slot: str

    def __str__(self) -> str:
        return self.slot

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        if spec:
            raise PromptError(f"Documents cannot be formatted as {shown(spec)}")
        return str(self)


class _OneDocument(_Slot, dict[str, Any]):
    """A document; mustache reaches its content and metadata by name."""

    def __init__(self, pending: _Pending, slots: _Slots) -> None:
        document, _, rank = pending
        content = slots.add([(document, None, rank)])
        super().__init__({**document.metadata, "page_content": content})
        self["metadata"] = document.metadata
        self.slot = slots.add([pending])


class _Documents(_Slot, list[_OneDocument]):
    """A list of documents; mustache may loop over it."""

    def __init__(self, items: list[_OneDocument], slot: str) -> None:
        super().__init__(items)
        self.slot = slot


class _Refused(_Slot, Mapping[Any, Any]):
    """Bad documents: an error as soon as a template prints them, loops over them or asks whether
    there are any, and not before. What a template finds in them is refused in the same way."""

    def __init__(self, error: PromptError) -> None:
        self.error = error

    def _refuse(self, *_: object) -> NoReturn:
        raise self.error

    __str__ = __repr__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse

    def __getitem__(self, key: object) -> Self:  # an error here is swallowed by mustache
        return self


class _Unprinted(_Slot):
    """What no template may print, though it may look into it."""

    error: PromptError

    def __str__(self) -> str:
        raise self.error

    __repr__ = __str__


class _RefusedList(_Unprinted, list[Any]):
    """A list of what should have been documents, or with documents deeper in it."""

    def __init__(self, items: Iterable[Any], error: PromptError) -> None:
        super().__init__(items)
        self.error = error


class _RefusedDict(_Unprinted, dict[Any, Any]):
    """What should have been a document, or has documents in it."""

    def __init__(self, items: Mapping[Any, Any], error: PromptError) -> None:
        super().__init__(items)
        self.error = error


class _RefusedSet(_Unprinted, set[Any]):
    """A set: what it prints depends on the process."""

    def __init__(self, items: Iterable[Any], error: PromptError) -> None:
        super().__init__(items)
        self.error = error


class _Nothing(_Slot):
    """None: mustache prints nothing for it, other templates would print the word."""

    _CHEVRON_return_scope_when_falsy = False

    def __init__(self, error: PromptError) -> None:
        self.error = error

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return hash(None)

    def __iter__(self) -> NoReturn:
        raise TypeError(str(self.error))  # as None does

    def __str__(self) -> str:
        raise self.error

    __repr__ = __str__


def _tested_for_none(prompt: Any) -> frozenset[str]:
    """Variables that jinja2 templates compare with None by identity (`is none`)."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    found = [
        _tested_in(one.template)
        for one in prompts
        if isinstance(one, PromptTemplate) and one.template_format == "jinja2"
    ]
    return frozenset().union(*found)


@lru_cache(256)
def _tested_in(template: str) -> frozenset[str]:
    from jinja2 import Environment, meta, nodes  # late: a template needs it, we do not

    tree = Environment(autoescape=True).parse(template)
    tests = [test for test in tree.find_all(nodes.Test) if test.name in ("none", "sameas")]
    names = {name.name for test in tests for name in test.find_all(nodes.Name)}
    variables = meta.find_undeclared_variables(tree)
    # A name of the template's own may stand for any of the variables.
    return frozenset(names if names <= variables else variables)


def _unless_mistaken(name: str, value: Any) -> Any:
    """`value`, which is no documents, unless somebody took it for some: an error where a template
    prints it."""
    if isinstance(value, Iterator | AsyncIterator | Coroutine):
        return _Refused(_refusal(name, _NO_LIST.format(type(value).__name__)))
    items = listed(value) or ()
    dicts = any(isinstance(item, Mapping) and _CONTENT in item for item in items)
    if not dicts:
        return value
    return _RefusedList(items, _refusal(name, _NO_DOCUMENT.format("a list of dicts")))


def _refusal(name: str, message: str) -> PromptError:
    return PromptError(f"Variable {shown(name)}: {message}")


def _is_mixed(value: Any) -> bool:
    """Whether this is a list of documents and other things, such as a pair of a dict's items()."""
    try:
        find_documents(value)
    except PromptError:
        return isinstance(value, list | tuple)
    return False
