"""The specification itself, against things that are known to be right."""

from __future__ import annotations

import pytest
import torch
from cases import Heads, make_table

from minipic_backend.attention.naive import naive_rotate, naive_span_attention, visibility


def random_qkv(num_tokens, heads=None, seed=0):
    heads = heads or Heads()
    torch.manual_seed(seed)
    q = torch.randn(num_tokens, heads.num_heads, heads.head_size, dtype=torch.float64)
    k, v = torch.randn(
        2, num_tokens, heads.num_kv_heads, heads.head_size, dtype=torch.float64
    ).unbind(0)
    return q, k, v


@pytest.mark.parametrize("heads", [Heads(), Heads(is_neox=False), Heads(rotary_dim=8)], ids=str)
def test_rotations_add_up(heads):
    rotary = heads.rotary()
    x = random_qkv(3, heads)[0]
    a, b = torch.tensor([5, 0, 900]), torch.tensor([-7, 3, -900])
    both = naive_rotate(naive_rotate(x, a, rotary), b, rotary)
    torch.testing.assert_close(both, naive_rotate(x, a + b, rotary), rtol=0, atol=1e-6)
    assert torch.equal(both[..., heads.rotary_dim :], x[..., heads.rotary_dim :])


def test_interleaved_rotation_is_a_complex_product():
    heads = Heads(is_neox=False)
    rotary = heads.rotary()
    x = random_qkv(4, heads)[0]
    positions = torch.tensor([0, 1, 50, 1000])
    half = heads.rotary_dim // 2
    table = rotary.cos_sin.double()[positions]
    turn = torch.complex(table[:, :half], table[:, half:])[:, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)))
    expected = torch.view_as_real(pairs * turn).flatten(-2)
    torch.testing.assert_close(naive_rotate(x, positions, rotary), expected)


def test_without_segments_it_is_causal_attention():
    heads = Heads(num_heads=6, num_kv_heads=2)
    rotary = heads.rotary()
    q, k, v = random_qkv(20, heads)
    positions = torch.arange(20)
    rq, rk = naive_rotate(q, positions, rotary), naive_rotate(k, positions, rotary)
    expected = torch.nn.functional.scaled_dot_product_attention(
        rq.transpose(0, 1), rk.repeat_interleave(3, 1).transpose(0, 1),
        v.repeat_interleave(3, 1).transpose(0, 1), is_causal=True, scale=0.3,
    ).transpose(0, 1)  # fmt: skip
    common = {"rotary": rotary, "scale": 0.3}
    for encoding, query, key in (("span_local", rq, rk), ("unrotated", q, k)):
        out = naive_span_attention(query, key, v, None, 0, encoding=encoding, **common)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("frame", ["none", "prefix"])
@pytest.mark.parametrize("offsets", ["compact", "padded"])
@pytest.mark.parametrize("see_markers", [True, False])
def test_both_encodings_give_the_same_scores(frame, offsets, see_markers):
    table = make_table(9, [5, 4], 3, 4, frame=frame, offsets=offsets, see_markers=see_markers)
    n = table.num_prompt_tokens + 3
    rotary = Heads().rotary()
    q, k, v = random_qkv(n)
    cached = torch.from_numpy(table.cached_positions(0, n))
    common = {"rotary": rotary, "scale": 0.3}
    unrotated = naive_span_attention(q, k, v, table, 0, encoding="unrotated", **common)
    rotated = naive_span_attention(
        naive_rotate(q, cached, rotary), naive_rotate(k, cached, rotary), v, table, 0,
        encoding="span_local", **common,
    )  # fmt: skip
    torch.testing.assert_close(rotated, unrotated, rtol=0, atol=1e-6)


def test_a_framed_span_is_the_prompt_of_its_frame_and_itself():
    table = make_table(12, [30, 21], 5, 16)
    span = table.segments[2]
    rotary = Heads().rotary()
    q, k, v = random_qkv(span.end)
    common = {"encoding": "unrotated", "rotary": rotary, "scale": 0.3}
    out = naive_span_attention(q[span.start :], k, v, table, span.start, **common)
    prompt = torch.cat((torch.arange(16), torch.arange(span.start, span.end)))
    alone = naive_span_attention(q[prompt], k[prompt], v[prompt], None, 0, **common)
    torch.testing.assert_close(out, alone[16:])


def test_visibility_of_a_small_prompt():
    """[8 8][S 9 9 pad][S pad pad pad][D 9] with blocks of 4, frame and markers as by default."""
    table = make_table(2, [3, 1], 2, 4)
    rows = ["".join("#" if x else "." for x in row) for row in visibility(table, 0, 14).tolist()]
    assert rows[3] == "####.........."
    assert rows[5] == "######........"  # the first span, behind its frame
    assert rows[8] == "####....#....."  # the second, too
    assert rows[13] == "#######.#...##"  # the question, without pads
