"""Prompt templates that keep documents whole: each becomes a span, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, overload

from langchain_core.documents import Document
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    ChatMessagePromptTemplate,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    SystemMessagePromptTemplate,
)
from langchain_core.prompts.chat import MessageLike, MessageLikeRepresentation
from langchain_core.prompts.string import PromptTemplateFormat, StringPromptTemplate
from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel, model_validator

from langchain_minipic._keeping import DocumentOptions, KeepsDocuments
from langchain_minipic.documents import DocumentLike, document_texts
from minipic_backend import Span
from minipic_backend.engines.turns import take_turn

__all__ = [
    "SpanAIMessagePromptTemplate",
    "SpanChatMessagePromptTemplate",
    "SpanHumanMessagePromptTemplate",
    "SpanPromptTemplate",
    "SpanSystemMessagePromptTemplate",
]

Template = TypeVar("Template", bound=BaseModel)
DocumentInput = str | Document | list[Document] | list[tuple[Document, float]]


class SpanHumanMessagePromptTemplate(KeepsDocuments, HumanMessagePromptTemplate):
    """A human message whose documents become spans."""


class SpanAIMessagePromptTemplate(KeepsDocuments, AIMessagePromptTemplate):
    """An answer whose documents become spans."""


class SpanSystemMessagePromptTemplate(KeepsDocuments, SystemMessagePromptTemplate):
    """A system message whose documents become spans."""


class SpanChatMessagePromptTemplate(KeepsDocuments, ChatMessagePromptTemplate):
    """A message of any role whose documents become spans."""


_KEEPING: dict[type, type[KeepsDocuments]] = {
    HumanMessagePromptTemplate: SpanHumanMessagePromptTemplate,
    AIMessagePromptTemplate: SpanAIMessagePromptTemplate,
    SystemMessagePromptTemplate: SpanSystemMessagePromptTemplate,
    ChatMessagePromptTemplate: SpanChatMessagePromptTemplate,
}


class SpanPromptTemplate(ChatPromptTemplate, DocumentOptions):
    """A `ChatPromptTemplate` that keeps documents whole.

        prompt = SpanPromptTemplate.from_messages(
            [("system", "Answer from the documents."), ("human", "{context}\\n\\n{question}")]
        )

    Where a variable's value is a `Document`, a list of them, or a list of (document, score), the
    message holds text blocks, those of the documents marked as spans. `Span`s, such as those of
    `minipic_backend.rank_spans`, are taken as they are, with their own ranks and without
    `document_prompt`. All other values are formatted as usual. The blocks' texts joined are the
    plain text, documents separated by blank lines, so the same prompt serves any other chat model.

    Combined by `+`, sliced, nested, or made partial, its messages go on keeping documents.
    """

    def __init__(
        self,
        messages: Sequence[MessageLikeRepresentation],
        *,
        template_format: PromptTemplateFormat = "f-string",
        **options: Any,
    ) -> None:
        """As `ChatPromptTemplate`, with the options of `DocumentOptions`, which hold for all its
        messages. Not given, they leave those alone that keep documents already."""
        super().__init__(messages, template_format=template_format, **options)

    @model_validator(mode="after")
    def _keep_documents(self) -> Self:
        self._keep()
        for name in self.input_variables + self.optional_variables:
            self.input_types.setdefault(name, DocumentInput)
        return self

    def _keep(self) -> None:
        given = {k: v for k, v in self._document_options().items() if k in self.model_fields_set}
        self.messages = [self._keeping(message, given) for message in self.messages]

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[MessageLikeRepresentation],
        template_format: PromptTemplateFormat = "f-string",
        **options: Any,
    ) -> Self:
        """As `ChatPromptTemplate.from_messages`, with the options of `DocumentOptions`."""
        return cls(messages, template_format=template_format, **options)

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langchain_minipic", "prompts"]

    def __add__(self, other: Any) -> Self:
        both = super().__add__(other)
        return self._like(both.messages, both.partial_variables)

    @overload
    def __getitem__(self, index: int) -> MessageLike: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> MessageLike | Self:
        if isinstance(index, int):
            return self.messages[index]
        return self._like(self.messages[index], self.partial_variables)

    def append(self, message: MessageLikeRepresentation) -> None:
        super().append(message)
        self._keep()

    def extend(self, messages: Sequence[MessageLikeRepresentation]) -> None:
        super().extend(messages)
        self._keep()

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> PromptValue:
        """As LangChain's; many at once leave the event loop time for others."""
        await take_turn()
        return await super().ainvoke(input, config, **kwargs)

    def partial(self, **kwargs: Any) -> Self:
        """This prompt with some variables filled in: by values, documents, or functions."""
        changes = {
            "messages": list(self.messages),
            "input_variables": [name for name in self.input_variables if name not in kwargs],
            "partial_variables": {**self.partial_variables, **kwargs},
        }
        return _changed(self, changes)

    def document_texts(
        self, documents: Iterable[DocumentLike] | Document | Span | str
    ) -> list[str]:
        """What the documents read as in this prompt."""
        return document_texts(documents, self._document_prompt())

    def frame(self) -> ChatPromptValue:
        """This prompt with a stand-in document for every variable that is still open.

        What precedes the first of them is the prefix that `ChatMiniPIC.warm` needs. Their ids are
        the variables' names.
        """
        template = self._document_prompt()
        wanted = set(template.input_variables if template else []) - {"page_content"}
        metadata = dict.fromkeys(wanted, "x")
        lists = {m.variable_name for m in _leaves(self) if isinstance(m, MessagesPlaceholder)}
        values: dict[str, Any] = {
            name: [] if name in lists else Document("document", id=name, metadata=metadata)
            for name in self.input_variables
        }
        return self.format_prompt(**values)

    def _document_prompt(self) -> StringPromptTemplate | None:
        """That of the first message with a variable to fill in."""
        for message in _leaves(self):
            if isinstance(message, KeepsDocuments) and message.input_variables:
                return message.document_prompt
        return self.document_prompt

    def _like(
        self, messages: Sequence[MessageLikeRepresentation], partials: Mapping[str, Any]
    ) -> Self:
        """Other messages with this prompt's options; those that have their own keep them."""
        bare = ChatPromptTemplate(messages)
        names = {*bare.input_variables, *bare.optional_variables}
        kept = {name: value for name, value in partials.items() if name in names}
        result = type(self)(
            [self._keeping(message) for message in bare.messages],
            partial_variables={**bare.partial_variables, **kept},
        )
        return _changed(result, self._document_options())

    def _keeping(
        self, message: MessageLike, options: Mapping[str, Any] | None = None
    ) -> MessageLike:
        """`message` with documents kept whole; `options` change one that keeps them already."""
        if isinstance(message, SpanPromptTemplate) and options:
            kept = [message._keeping(one, options) for one in message.messages]
            return _changed(message, {**options, "messages": kept})
        if isinstance(message, SpanPromptTemplate | KeepsDocuments):
            return _changed(message, options) if options else message
        if isinstance(message, ChatPromptTemplate):
            return self._like(message.messages, message.partial_variables)
        keeping = _KEEPING.get(type(message))
        if keeping is None:
            return message
        return keeping(**{**dict(message), **self._document_options()})


def _changed(template: Template, changes: Mapping[str, Any]) -> Template:
    copy = template.model_copy(update=changes)
    copy.__dict__.pop("_serialized", None)  # LangChain's cache of what it was
    return copy


def _leaves(template: ChatPromptTemplate) -> Iterator[MessageLike]:
    for message in template.messages:
        if isinstance(message, ChatPromptTemplate):
            yield from _leaves(message)
        else:
            yield message
