"""Rotary tables as attention reads them, and rotation by them in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rotary", "cos_sin_table", "rotate"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of one attention layer.

    Args:
        cos_sin: [num_positions, rotary_dim], float32: the cosines of a position, then its sines,
            without mscale.
        is_neox: dims i and i + rotary_dim/2 turn together (Llama, NeoX); False: 2i and 2i + 1
            (GPT-J).
        mscale: factor that the model puts on its own cos/sin table (YaRN); 1.0 for all others.
    """

    cos_sin: Tensor
    is_neox: bool = True
    mscale: float = 1.0

    def __post_init__(self) -> None:
        if self.cos_sin.dim() != 2 or self.rotary_dim % 2 != 0:
            raise ValueError(f"cos_sin of shape {tuple(self.cos_sin.shape)}: two dims, even last")

    @property
    def rotary_dim(self) -> int:
        return int(self.cos_sin.shape[1])


def cos_sin_table(
    inv_freq: Tensor, num_positions: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[num_positions, 2 * len(inv_freq)], angles in float64 and rounded once.

    Args:
        inv_freq: [rotary_dim / 2], radians per position.
        num_positions: largest distance or position that occurs, plus one.
        dtype: of the table.
    """
    positions = torch.arange(num_positions, dtype=torch.float64, device=inv_freq.device)
    angles = positions[:, None] * inv_freq.to(torch.float64)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_neox: bool, dim: int = -1) -> Tensor:
    """R x: rotates the first `rotary_dim` entries of x along `dim`; the rest passes through.

    Args:
        x: any shape, with head_size entries along `dim`.
        cos: broadcastable to x with rotary_dim / 2 entries along `dim`.
        sin: like cos.
        is_neox: see `Rotary`.
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
