"""A technique's attention inside a transformers model: explicit masks, keys at two positions.

Tokens of spans are computed at their cached positions. A dependent token meets a key as if it
stood `shift` further on, so that keys are turned once more for it: R_shift (R_p k) = R_{p+shift} k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from minipic_backend.adapt.examples import Example
from minipic_backend.attention.rotary import rotate

__all__ = ["IMPLEMENTATION", "inverse_frequencies", "spans_of"]

IMPLEMENTATION = "minipic_spans"
"""Name under which transformers knows this attention; without an example it is causal."""

_current: list[tuple[Example, Tensor]] = []


@contextmanager
def spans_of(example: Example, inv_freq: Tensor) -> Iterator[None]:
    """Forward passes inside see the spans of `example`, a batch of one sequence.

    Args:
        example: on the model's device.
        inv_freq: [rotary_dim / 2], of `inverse_frequencies`.
    """
    _current.append((example, inv_freq))
    try:
        yield
    finally:
        _current.pop()


def inverse_frequencies(model: Any) -> Tensor:
    """Of a Llama-like model's rotary embedding, in radians per position.

    Raises:
        ValueError: none is found, or several that differ.
    """
    found = [
        module.inv_freq
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), Tensor)
    ]
    if not found or any(not torch.equal(found[0], other) for other in found[1:]):
        raise ValueError("adapt needs a model with one rotary embedding for all layers")
    first: Tensor = found[0]
    return first.detach().float()


def span_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the attention layer; not used.
        query: [1, num_heads, num_tokens, head_size], rotated.
        key: [1, num_kv_heads, num_tokens, head_size], rotated by cached positions.
        value: like key, not rotated.
        attention_mask: not used: the example knows.
        scaling: factor on the scores.
        dropout: not used.
        **kwargs: what other implementations take; not used.

    Returns:
        [1, num_tokens, num_heads, head_size], and no weights.
    """
    if not _current:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    example, inv_freq = _current[-1]
    angles = (example.shifts[:, None].double() * inv_freq.to(key.device))[None, None]
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    turned = rotate(key, cos, sin, is_neox=True).to(key.dtype)
    # PyTorch's fused kernels take a mask, or grouped heads, not both.
    group = query.shape[1] // key.shape[1]
    value = value.repeat_interleave(group, dim=1)
    out = torch.empty_like(query)
    for keys, rows in ((key, ~example.dependent), (turned, example.dependent)):
        index = rows.nonzero()[:, 0]
        out[:, :, index] = scaled_dot_product_attention(
            query[:, :, index],
            keys.repeat_interleave(group, dim=1),
            value,
            attn_mask=example.mask[index],
            scale=scaling,
        )
    return out.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, span_attention)
