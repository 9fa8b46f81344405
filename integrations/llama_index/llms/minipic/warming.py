"""Nodes computed as they come in, so that the first question finds them in the cache."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.minipic.base import MiniPIC
from pydantic import Field

__all__ = ["SpanWarmer"]


class SpanWarmer(TransformComponent):
    """Warms nodes at the end of an ingestion pipeline, and passes them on as they are.

        pipeline = IngestionPipeline(transformations=[SentenceSplitter(), SpanWarmer(llm=llm)])

    Put it last: a node must be warmed as it will be retrieved, with all its metadata.

    Args:
        llm: the model.
        prompt: where nodes will be used, as for `MiniPIC.warm`.
        progress: show a progress bar.
        run_id: makes every warmer unlike any other. A pipeline skips what its cache has seen
            before; in a new process, however, nothing is warm.
    """

    llm: MiniPIC = Field(exclude=True)
    prompt: Any = Field(default=None, exclude=True)
    progress: bool = True
    run_id: str = Field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def class_name(cls) -> str:
        return "SpanWarmer"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Computes the nodes.

        Raises:
            PromptError: a node that does not fit into the context.
        """
        if nodes:
            self.llm.warm(nodes, self.prompt, progress=self.progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same, without holding up the event loop."""
        if nodes:
            await self.llm.awarm(nodes, self.prompt, progress=self.progress)
        return nodes
