"""What a node reads as in a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from minipic_backend import PromptError
from minipic_backend.chat import document_core
from minipic_backend.errors import shown

__all__ = ["NodeLike", "NodeText", "node_text", "ranked", "text_of", "texts_of"]

NodeLike = BaseNode | NodeWithScore | str


@dataclass(frozen=True, slots=True)
class NodeText:
    """A whole node, as text.

    Args:
        text: its content with metadata, by its own templates.
        rank: its place in the order of relevance, 0 the best; None where there is no order.
        id: the node's id, for `explain`.
    """

    text: str
    rank: int | None = None
    id: str | None = None


def node_text(node: BaseNode) -> str:
    """A node's text for the model: its own templates, metadata in the order of their keys.

    Stores give metadata back in whatever order they like; a node must read the same each time to
    be the same span.
    """
    metadata = dict(sorted(node.metadata.items(), key=lambda item: str(item[0])))
    copy = node.model_copy(update={"metadata": metadata})
    return document_core(copy.get_content(metadata_mode=MetadataMode.LLM))


def text_of(node: Any) -> str:
    """Text of a node, a node with its score, or a str.

    Raises:
        PromptError: something else.
    """
    if isinstance(node, NodeWithScore):
        node = node.node
    if isinstance(node, BaseNode):
        return node_text(node)
    if isinstance(node, str):
        return document_core(node)
    raise PromptError(f"Not a node but {type(node).__name__}: {shown(node)}")


def texts_of(nodes: Any) -> list[str]:
    """Texts of nodes, or of one.

    Raises:
        PromptError: something else.
    """
    if isinstance(nodes, NodeWithScore | BaseNode | str):
        return [text_of(nodes)]
    if not isinstance(nodes, Iterable):
        raise PromptError(
            f"Not nodes but {type(nodes).__name__}; those of an index are "
            "index.docstore.docs.values()"
        )
    return [text_of(node) for node in nodes]


def ranked(nodes: Sequence[NodeText], scores: Sequence[float | None]) -> list[NodeText]:
    """Nodes with ranks by score, the highest first. One without a score has no rank: what was not
    searched for comes in an order of its own, such as that of a text's parts."""
    known = [(-score, place) for place, score in enumerate(scores) if score is not None]
    ranks = {place: rank for rank, (_, place) in enumerate(sorted(known))}
    return [replace(node, rank=ranks.get(place)) for place, node in enumerate(nodes)]
