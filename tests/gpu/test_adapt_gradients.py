"""Training on CUDA: `pytest tests/gpu/test_adapt_gradients.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from minipic_backend.adapt.examples import Example
from minipic_backend.adapt.span_attention import full_attention_of, span_attention, spans_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HEADS, KV_HEADS, SIZE = 4, 2, 64
MAX_ERROR = 0.02
"""Of a gradient's norm, in bfloat16."""


def example(num_tokens: int) -> Example:
    """Two prompts: in each, a span of a third of its tokens, seen by those behind it."""
    half = num_tokens // 2
    lengths = [half, num_tokens - half]
    positions, mask, dependent = [], torch.zeros(num_tokens, num_tokens).bool(), []
    for start, length in zip((0, half), lengths, strict=True):
        span = length // 3
        positions += [torch.arange(length)]
        mask[start : start + length, start : start + length] = True
        mask[start + span : start + 2 * span, start : start + span] = False
        dependent += [torch.arange(length) >= 2 * span]
    everywhere = torch.cat(positions)
    none = torch.zeros(0, dtype=torch.int64)
    return Example(
        none, everywhere, none, everywhere, 3 * torch.cat(dependent).long(), mask.tril(),
        torch.cat(dependent), none, none, none.bool(), none.float(),
    ).to(torch.device("cuda"))  # fmt: skip


def inputs(num_tokens: int, score: float, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value, whose scores are about `score` everywhere."""
    made = torch.Generator("cuda").manual_seed(num_tokens)
    shapes = [(1, heads, num_tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (
        0.1 * torch.randn(shape, generator=made, device="cuda") for shape in shapes
    )
    query[..., 0], key[..., 0] = 1.0, score * SIZE**0.5
    return [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (query, key, value)]


def gradients(seen: Example, teacher: bool, tensors: list[Tensor]) -> list[Tensor]:
    inv_freq = torch.zeros(SIZE // 2, device="cuda")  # turned by nothing: scores stay
    with full_attention_of(seen) if teacher else spans_of(seen, inv_freq):
        out, _ = span_attention(torch.nn.Module(), *tensors, None)
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
        return list(torch.autograd.grad((out * weights).sum(), tensors))


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("score", [0.0, -120.0, 120.0])
@pytest.mark.parametrize("num_tokens", [64, 65, 127, 192, 320, 704, 832, 835, 1024])
def test_gradients_are_those_of_the_formula(
    num_tokens: int, score: float, teacher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of tokens and the scores (Qwen2.5 has heads with very low ones)."""
    from minipic_backend.adapt import span_attention as module

    seen = example(num_tokens)
    got = gradients(seen, teacher, inputs(num_tokens, score, torch.bfloat16))
    monkeypatch.setattr(module, "_KERNELS", [SDPBackend.MATH])
    want = gradients(seen, teacher, inputs(num_tokens, score, torch.float64))
    for name, one, other in zip(("query", "key", "value"), got, want, strict=True):
        assert one.isfinite().all(), name
        # Not the large channel of keys: a query's gradient there is a difference of large numbers.
        error = (one.double() - other)[..., 1:].norm() / other[..., 1:].norm()
        assert error < MAX_ERROR, name
