"""How close an engine's answer must be, to the reference and to another answer of its own.

Measured on this model, root mean square over the vocabulary: float32 engines are within 3e-5 of the
float64 reference, bfloat16 engines within 0.2, and so are they with ordinary prompts. Ways to
compute one prompt differ only by the shapes of their matrix products: mostly not by one bit, else
by 1e-5 in float32; in bfloat16 by 0.05 in prefill. Decoding in bfloat16 adds up what its shapes
make, for ordinary prompts as well: 0.05 to 0.13 over three to six tokens, up to 0.25 at the last of
them. So there all tokens count together, which tells more than the largest of few.

Tiles of AMX add up otherwise for each number of rows: where a machine has them, vLLM's own
computation of ordinary prompts of 391 to 596 tokens, whole, in chunks and from the cache, differs
by up to 0.19 in prefill (36 pairs, a sixth of them above 0.1; prompts with spans up to 0.21, and
their keys and values, of the order of 10, by 0.19 from stock vLLM's). Prefill in bfloat16 has a
wider limit there, float32 the same.

`test_tolerances.py` shows that any mistake in the semantics is far outside of the float32 limits,
and that all but subtle ones are outside of the bfloat16 limits.
"""

from __future__ import annotations

from typing import Any

import torch

from minipic_backend.config import SpanOptions
from minipic_backend.spans.segments import parse_segments

__all__ = [
    "CONTENT",
    "DECODE",
    "HAS_TILES",
    "PREFILL",
    "TO_TRUTH",
    "assert_same",
    "assert_true",
    "distance",
    "together",
]

HAS_TILES = torch.cpu._is_amx_tile_supported()
TO_TRUTH = {"float32": 1e-4, "bfloat16": 0.3}
PREFILL = {"float32": 1e-4, "bfloat16": 0.25 if HAS_TILES else 0.1}
CONTENT = PREFILL
"""Of keys and values in the cache."""
DECODE = {"float32": 1e-4, "bfloat16": 0.15}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest, over tokens, of the root mean square difference in log-probability."""
    return float(_squares(got, want).sqrt().max())


def together(got: torch.Tensor, want: torch.Tensor) -> float:
    """The root mean square difference in log-probability, over tokens and vocabulary."""
    return float(_squares(got, want).mean().sqrt())


def _squares(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    assert got.shape == want.shape
    return (got - want).pow(2).mean(-1)


def assert_same(rig: Any, got: Any, want: Any) -> None:
    """Two answers of one engine to one prompt."""
    assert got.token_ids == want.token_ids
    assert distance(got.logprobs[:1], want.logprobs[:1]) <= PREFILL[rig.dtype]
    if len(got.token_ids) > 1:
        measure = distance if rig.dtype == "float32" else together
        assert measure(got.logprobs[1:], want.logprobs[1:]) <= DECODE[rig.dtype]


def assert_true(
    rig: Any, truth: Any, answer: Any, token_ids: list[int], options: SpanOptions | None = None
) -> None:
    """An engine's answer and the float64 reference, at each generated token."""
    table = parse_segments(token_ids, rig.config, options or rig.config.options)
    want = truth.logprobs(token_ids, table, answer.token_ids[:-1])
    assert distance(answer.logprobs, want) <= TO_TRUTH[rig.dtype]
