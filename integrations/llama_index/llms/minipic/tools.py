"""A tool whose results are nodes, and stay so."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeWithScore
from llama_index.core.tools import RetrieverTool, ToolOutput
from llama_index.llms.minipic._messages import span_blocks
from llama_index.llms.minipic._nodes import NodeText, ranked, text_of

__all__ = ["SpanRetrieverTool"]


class SpanRetrieverTool(RetrieverTool):
    """LlamaIndex's `RetrieverTool`, with a span for each node it finds.

    In an agent's prompt the nodes stand behind the question. To have them reused with other
    questions too, give the model `frame="none"`: with frame "prefix" the question is part of it.
    An agent that reads results as text (`ReActAgent`) gets text.
    """

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """Retrieves; `raw_output` has the nodes."""
        return _with_spans(super().call(*args, **kwargs))

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """Retrieves; `raw_output` has the nodes."""
        return _with_spans(await super().acall(*args, **kwargs))


def _with_spans(output: ToolOutput) -> ToolOutput:
    found: list[NodeWithScore] = output.raw_output
    texts = [NodeText(text_of(one), id=one.node.node_id) for one in found]
    nodes = [node for node in ranked(texts, [one.score for one in found]) if node.text]
    return ToolOutput(
        tool_name=output.tool_name,
        blocks=[
            block for node in nodes for block in span_blocks(node.text, rank=node.rank, id=node.id)
        ],
        raw_input=output.raw_input,
        raw_output=found,
    )
