"""How documents survive chains that join them to a string."""

from __future__ import annotations

from typing import Any

from langchain_core.prompts import PromptTemplate
from langchain_core.prompts.string import StringPromptTemplate

from langchain_minipic._marks import mark

__all__ = ["SpanDocumentPrompt"]


class SpanDocumentPrompt(StringPromptTemplate):
    """A `document_prompt` that keeps documents apart.

        create_stuff_documents_chain(llm, prompt, document_prompt=SpanDocumentPrompt())

    The chain joins documents to one string; this marks where each stands. A `SpanPromptTemplate`
    takes the marks out again and makes blocks of them, so that any model may follow; with any
    other prompt they reach the model, which has to be one of ours.
    """

    template: StringPromptTemplate

    def __init__(
        self, template: str | StringPromptTemplate = "{page_content}", **kwargs: Any
    ) -> None:
        """`template`: over `page_content` and metadata."""
        if isinstance(template, str):
            template = PromptTemplate.from_template(template)
        kwargs.setdefault("input_variables", template.input_variables)
        super().__init__(**{**kwargs, "template": template})

    @property
    def _prompt_type(self) -> str:
        return "minipic-document"

    def format(self, **kwargs: Any) -> str:
        """The marked text of one document."""
        return mark(self.template.format(**kwargs))

    async def aformat(self, **kwargs: Any) -> str:
        """`format`, for templates that are formatted asynchronously."""
        return mark(await self.template.aformat(**kwargs))
