"""The rotary embeddings of a loaded model: found, checked by exact class, and read as tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from minipic_backend.attention.rotary import Rotary
from minipic_backend.errors import UnsupportedModelError

__all__ = ["SUPPORTED_ROTARY", "find_rotary", "skip_rotation"]

SUPPORTED_ROTARY = frozenset(
    {
        "RotaryEmbedding",
        "Llama3RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
"""Exact class names: a subclass may rotate differently, so an unknown one is refused."""


class _Unrotated(nn.Module):
    """Stands in for a rotary embedding where keys are cached without rotation."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return query, key


def find_rotary(model: nn.Module, model_name: str, max_model_len: int) -> dict[str, Rotary]:
    """The rotary table of each attention layer, by layer name; layers share equal tables.

    Raises:
        UnsupportedModelError: a layer without rotary embedding (ALiBi, learned or no positions),
            or with one that we do not know; attention other than full and causal.
    """
    tables: dict[int, Rotary] = {}
    found: dict[str, Rotary] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, Attention):
            continue
        rotary = _rotary_of(model, path)
        _check_layer(layer, rotary, path, model_name)
        if id(rotary) not in tables:
            tables[id(rotary)] = _table(rotary, max_model_len, model_name)
        found[layer.layer_name] = tables[id(rotary)]
    if not found:
        raise UnsupportedModelError(
            f"Spans do not work with {model_name}: no attention layers found"
        )
    return found


def skip_rotation(model: nn.Module) -> None:
    """Takes every rotary embedding out of the model; attention then rotates by itself."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RotaryEmbeddingBase):
                setattr(module, name, _Unrotated())


def _rotary_of(model: nn.Module, attention_path: str) -> Any:
    parent_path = attention_path.rpartition(".")[0]
    return getattr(model.get_submodule(parent_path), "rotary_emb", None)


def _check_layer(layer: Attention, rotary: Any, path: str, model_name: str) -> None:
    impl: Any = layer.impl
    name = type(rotary).__name__
    for wrong, what in (
        (getattr(impl, "alibi_slopes", None) is not None, "uses ALiBi instead of rotary positions"),
        (
            rotary is None,
            "has no rotary embedding of vLLM's (learned or no positions, or a model that vLLM "
            "runs through transformers)",
        ),
        (rotary is not None and name not in SUPPORTED_ROTARY, f"uses {name}"),
        (
            getattr(rotary, "head_size", layer.head_size) != layer.head_size,
            "rotates something else than whole heads",
        ),
        (layer.sliding_window is not None, "uses sliding-window attention"),
        (getattr(impl, "sinks", None) is not None, "uses attention sinks"),
        (layer.attn_type != "decoder", f"has {layer.attn_type} attention"),
    ):
        if wrong:
            raise UnsupportedModelError(
                f"Spans do not work with {model_name}: layer {path} {what}. Supported are "
                f"full-attention decoders with {', '.join(sorted(SUPPORTED_ROTARY))}."
            )


def _table(rotary: Any, max_model_len: int, model_name: str) -> Rotary:
    # The module's own buffer is in the model's dtype; re-computed, it is exact to fp32.
    cache = rotary._compute_cos_sin_cache().float().cpu()
    if cache.shape[0] < max_model_len:
        raise UnsupportedModelError(
            f"The rotary table of {model_name} ends at {cache.shape[0]}, before "
            f"max_model_len={max_model_len}: lower that"
        )
    mscale = float(getattr(rotary, "mscale", 1.0))
    return Rotary((cache / mscale)[:max_model_len].contiguous(), rotary.is_neox_style, mscale)
