"""Rotary tables as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rotary", "cos_sin_table"]


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
