"""The nodes that a response synthesizer is working on.

Synthesizers give a prompt helper texts without scores or ids, and some join them first. LlamaIndex
reports every synthesis to instrumentation; from there we know the nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from llama_index.core.instrumentation.span import SimpleSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.llms.minipic._nodes import NodeText, node_text, ranked
from llama_index_instrumentation import get_dispatcher

__all__ = ["find_nodes", "watch"]

# Never reset: text is looked up by what it says, so nodes of an earlier synthesis do no harm, and
# a stream is read when its synthesis is long over.
_nodes: ContextVar[tuple[NodeWithScore, ...]] = ContextVar("minipic_nodes", default=())


class _Watcher(BaseSpanHandler[SimpleSpan]):
    """Notes down the nodes of each synthesis; keeps no spans."""

    @classmethod
    def class_name(cls) -> str:
        return "MiniPICNodeWatcher"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        nodes = bound_args.arguments.get("nodes")
        if isinstance(instance, BaseSynthesizer) and isinstance(nodes, list | tuple):
            _nodes.set(tuple(node for node in nodes if isinstance(node, NodeWithScore)))

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        pass


def watch() -> None:
    """Have syntheses reported from now on. Any further call does nothing."""
    dispatcher = get_dispatcher()
    if not any(isinstance(handler, _Watcher) for handler in dispatcher.span_handlers):
        dispatcher.add_span_handler(_Watcher())


def find_nodes(texts: Sequence[str]) -> list[NodeText] | None:
    """The nodes that `texts`, or their parts, are: ranked by score, in the order of the texts.

    None where the texts are not, to the letter, nodes of the latest synthesis.
    """
    candidates = [
        (found.node.get_content(metadata_mode=MetadataMode.LLM).strip(), found)
        for found in _nodes.get()
        if isinstance(found.node, BaseNode)
    ]
    found: list[NodeWithScore] = []
    for text in texts:
        run = _run(text.strip(), candidates)
        if run is None:
            return None
        found += run
    if not found:
        return None
    plain = [NodeText(node_text(one.node), id=one.node.node_id) for one in found]
    return ranked(plain, [one.score for one in found])


def _run(text: str, candidates: Sequence[tuple[str, NodeWithScore]]) -> list[NodeWithScore] | None:
    """Neighbouring candidates that, with white space between them, are `text`."""
    for start in range(len(candidates)):
        place, run = 0, []
        for content, node in candidates[start:]:
            if not content:
                continue
            if not text.startswith(content, place):
                break
            run.append(node)
            place += len(content)
            rest = text[place:].lstrip()
            if not rest:
                return run
            if len(rest) == len(text) - place:  # no white space: inside a longer word
                break
            place = len(text) - len(rest)
    return None
