"""A technique's attention inside a transformers model: explicit masks, keys at two positions.

Tokens of spans are computed at their cached positions. A dependent token meets a key as if it
stood `shift` further on, so that keys are turned once more for it: R_shift (R_p k) = R_{p+shift} k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from minipic_backend.adapt.examples import Example
from minipic_backend.attention.rotary import rotate

__all__ = ["IMPLEMENTATION", "full_attention_of", "inverse_frequencies", "spans_of"]

IMPLEMENTATION = "minipic_spans"
"""Name under which transformers knows this attention; without an example it is causal."""

# With a mask, cuDNN's gradients (the default on Hopper from torch 2.11 on) are not numbers where a
# number of tokens leaves 64 over 128 and scores are low: pytorch/pytorch#196678.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens that see keys at the same positions.

    Args:
        index: int64 [num_rows]; None: all tokens.
        mask: bool [num_rows, num_tokens].
        turn: cos and sin, [1, 1, num_tokens, rotary_dim / 2], by which they see keys turned on.
    """

    index: Tensor | None
    mask: Tensor
    turn: tuple[Tensor, Tensor] | None = None


_current: list[list[_Rows]] = []


@contextmanager
def spans_of(example: Example, inv_freq: Tensor) -> Iterator[None]:
    """Forward passes inside see the spans of `example`, as a batch of one sequence.

    Args:
        example: on the model's device.
        inv_freq: [rotary_dim / 2], of `inverse_frequencies`.
    """
    device = example.shifts.device
    angles = (example.shifts[:, None].double() * inv_freq.to(device))[None, None]
    context, dependent = (~example.dependent).nonzero()[:, 0], example.dependent.nonzero()[:, 0]
    rows = [
        _Rows(context, example.mask[context]),
        _Rows(dependent, example.mask[dependent], (angles.cos(), angles.sin())),
    ]
    with _seeing(rows):
        yield


@contextmanager
def full_attention_of(example: Example) -> Iterator[None]:
    """Forward passes inside see the teacher's prompts of `example`, each by itself, causally.

    Args:
        example: on the model's device.
    """
    prompts = (example.teacher_positions == 0).cumsum(0)
    if prompts[-1] == 1:
        yield  # causal, without a mask
        return
    with _seeing([_Rows(None, (prompts[:, None] == prompts).tril())]):
        yield


@contextmanager
def _seeing(rows: list[_Rows]) -> Iterator[None]:
    _current.append(rows)
    try:
        with sdpa_kernel(_KERNELS):
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
        attention_mask: not used: the example knows it.
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
    # PyTorch's fused kernels take a mask, or grouped heads, not both.
    group = query.shape[1] // key.shape[1]
    value = value.repeat_interleave(group, dim=1)
    out = torch.empty_like(query)
    for rows in _current[-1]:
        keys = key if rows.turn is None else _turned(key, *rows.turn)
        index = slice(None) if rows.index is None else rows.index
        out[:, :, index] = scaled_dot_product_attention(
            query[:, :, index],
            keys.repeat_interleave(group, dim=1),
            value,
            attn_mask=rows.mask,
            scale=scaling,
        )
    return out.transpose(1, 2), None


def _turned(key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    return rotate(key, cos.to(wide), sin.to(wide), is_neox=True).to(key.dtype)


AttentionInterface.register(IMPLEMENTATION, span_attention)
