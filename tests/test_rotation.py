"""Rotation by a table, against the formula itself in float64 complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minipic_backend.attention.rotary import Rotary, cos_sin_table, rotate

HEAD_SIZE = 16
styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
parts = pytest.mark.parametrize("rotary_dim", [HEAD_SIZE, 6], ids=["whole", "partial"])


def inv_freq(rotary_dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def angles(positions: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = positions[:, None].double() * inv_freq(rotary_dim)
    return angle.cos(), angle.sin()


def by_formula(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, is_neox: bool) -> Any:
    """z e^{i p f}: dims (i, i + half) or (2i, 2i + 1) are the parts of z. x: [tokens, head_size]"""
    half = rotary_dim // 2
    first = torch.arange(half) if is_neox else torch.arange(0, rotary_dim, 2)
    second = first + (half if is_neox else 1)
    turned = torch.complex(x[:, first], x[:, second]) * torch.polar(
        torch.ones(1, dtype=torch.float64), positions[:, None] * inv_freq(rotary_dim)
    )
    result = x.clone()
    result[:, first], result[:, second] = turned.real, turned.imag
    return result


@styles
@parts
def test_formula(is_neox: bool, rotary_dim: int) -> None:
    x = torch.randn(7, HEAD_SIZE, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 17, 100, 2047, -5])
    cos, sin = angles(positions, rotary_dim)
    got = rotate(x, cos, sin, is_neox=is_neox)
    torch.testing.assert_close(
        got, by_formula(x, positions, rotary_dim, is_neox), rtol=0, atol=1e-12
    )


@styles
@parts
def test_rotations_add_up(is_neox: bool, rotary_dim: int) -> None:
    x = torch.randn(5, HEAD_SIZE, dtype=torch.float64)
    one, other = torch.tensor([3, 0, 40, 7, 1000]), torch.tensor([5, 9, -40, 100, 24])

    def turn(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return rotate(x, *angles(by, rotary_dim), is_neox=is_neox)

    torch.testing.assert_close(turn(turn(x, one), other), turn(x, one + other), rtol=0, atol=1e-12)


@styles
def test_scores_depend_on_distances_only(is_neox: bool) -> None:
    q, k = torch.randn(2, 1, HEAD_SIZE, dtype=torch.float64)

    def score(at_query: int, at_key: int) -> torch.Tensor:
        turned = [
            rotate(x, *angles(torch.tensor([at]), HEAD_SIZE), is_neox=is_neox)
            for x, at in ((q, at_query), (k, at_key))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(50, 10), score(1050, 1010), rtol=0, atol=1e-10)
    assert abs(score(50, 10) - score(50, 11)) > 1e-3


@styles
def test_any_dimension_may_hold_the_head(is_neox: bool) -> None:
    """Keys come as columns: [heads, head_size, tokens]."""
    x = torch.randn(2, 5, HEAD_SIZE)
    positions = torch.arange(5)
    cos, sin = (part.float() for part in angles(positions, 6))
    want = rotate(x, cos[None], sin[None], is_neox=is_neox)
    got = rotate(x.transpose(1, 2), cos.t()[None], sin.t()[None], is_neox=is_neox, dim=1)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_result_has_the_wider_dtype_and_the_input_stays(dtype: torch.dtype) -> None:
    x = torch.randn(3, HEAD_SIZE).to(dtype)
    before = x.clone()
    cos, sin = (part.float() for part in angles(torch.arange(3), 6))
    got = rotate(x, cos, sin, is_neox=True)
    assert got.dtype == torch.float32
    assert torch.equal(x, before)
    assert torch.equal(got[:, 6:], x[:, 6:].float())


def test_table_is_exact_to_float32_at_far_positions() -> None:
    table = cos_sin_table(inv_freq(HEAD_SIZE).float(), 100_001)
    angle = 100_000 * inv_freq(HEAD_SIZE).float().double()
    want = torch.cat((angle.cos(), angle.sin())).float()
    assert torch.equal(table[100_000], want)


def test_odd_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        Rotary(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="two dims"):
        Rotary(torch.zeros(4))
