"""Rotary tables in fp32, free of attention scaling, and rotation by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RotaryTable", "rotate"]


@dataclass(frozen=True)
class RotaryTable:
    """Rotations of one attention layer.

    Args:
        cos: [max_position, rotary_dim / 2], float32; |cos + i sin| = 1 (no mscale in it).
        sin: the same for the sine.
        is_neox: halves are rotated against each other (Llama); otherwise neighbours (GPT-J).
        mscale: factor of scaled tables (YaRN) on rotated queries and keys; 1 where there is none.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox: bool
    mscale: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_neox: bool, dim: int = -1
) -> torch.Tensor:
    """R x: rotates the first `rotary_dim` entries of x along `dim`; the rest passes through.

    Args:
        x: any shape, with head_size entries along `dim`.
        cos: broadcastable to x with rotary_dim / 2 entries along `dim`.
        sin: like cos.
        is_neox: see `RotaryTable`.
        dim: the dimension of head_size.

    Returns:
        A new tensor of x's shape, in the wider of the two dtypes.
    """
    dim = dim % x.dim()
    half = cos.shape[dim]
    rotated, rest = x.narrow(dim, 0, 2 * half), x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)
    if is_neox:
        a, b = rotated.narrow(dim, 0, half), rotated.narrow(dim, half, half)
    else:
        pairs = (*rotated.shape[:dim], half, 2, *rotated.shape[dim + 1 :])
        a, b = rotated.reshape(pairs).unbind(dim + 1)
    # (a', b') = (a cos - b sin, b cos + a sin)
    first, second = a * cos - b * sin, b * cos + a * sin
    if is_neox:
        parts = [first, second]
    else:
        parts = [torch.stack((first, second), dim=dim + 1).flatten(dim, dim + 1)]
    if rest.shape[dim]:
        parts.append(rest.to(first.dtype))
    return torch.cat(parts, dim=dim)
