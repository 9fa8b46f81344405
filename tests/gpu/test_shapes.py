"""Head sizes, soft cap, block sizes and an fp8 KV cache, in the engine, with tiny random models.

`pytest tests/gpu/test_shapes.py -s`, about two minutes; each engine is eager, of two layers.

Tolerances, from the same models in float32 on a CPU, KL from the exact answer: noise of bfloat16's
size behind every attention 3e-6, queries, keys and values rounded to fp8 1e-3 (and 7e-6 to 2e-5
between two such runs that differ in noise), padded in place of compact offsets 2e-2 to 1e-1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_engine import MARKERS, Reference, Rig, kl, prompt

from minipic_backend.config import CONFIG_KEY, SpanConfig, SpanOptions
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.models import ensure_smollm2
from minipic_backend.plugin import register
from minipic_backend.spans.segments import parse_segments

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@dataclass(frozen=True)
class Case:
    """A model, and how the engine runs it."""

    kind: str
    heads: tuple[int, int, int]  # query heads, KV heads, head size
    encoding: str = "span_local"
    block_size: int = 16
    cache_dtype: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def reference_kl(self) -> float:
        return 1e-3 if self.cache_dtype == "auto" else 4e-3

    def save(self, folder: Path) -> str:
        num_heads, num_kv_heads, head_size = self.heads
        return save_tiny(
            folder, str(ensure_smollm2(progress=False)), self.kind, hidden_size=256,
            intermediate_size=256, num_hidden_layers=2, num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads, head_dim=head_size, max_position_embeddings=2048,
            initializer_range=0.06, **self.settings,
        )  # fmt: skip


RUNS_KL = 1e-3
GEMMA = {
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 5.0,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
}
CASES = {
    "80": Case("llama", (4, 2, 80)),
    "96 unrotated, blocks of 32": Case("llama", (8, 1, 96), "unrotated", 32),
    "256 capped": Case("gemma2", (4, 2, 256), settings=GEMMA),
    "128 fp8, blocks of 32": Case("llama", (8, 2, 128), "span_local", 32, "fp8"),
    "64 fp8 unrotated": Case("llama", (4, 4, 64), "unrotated", 16, "fp8_e4m3"),
}


class ShapeRig(Rig):
    def __init__(self, case: Case, folder: str, **options: Any) -> None:
        register()
        self.case = case
        self.config = SpanConfig(
            **MARKERS,
            block_size=case.block_size,
            key_encoding=case.encoding,  # type: ignore[arg-type]
        )
        self.driver = EngineDriver(
            {
                "model": folder,
                "dtype": "bfloat16",
                "enforce_eager": True,
                "block_size": case.block_size,
                "kv_cache_dtype": case.cache_dtype,
                "max_model_len": 2048,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 2048,
                "gpu_memory_utilization": 0.1,
                "kv_cache_memory_bytes": 2**28,
                "max_logprobs": -1,
                "additional_config": {CONFIG_KEY: {**MARKERS, "key_encoding": case.encoding}},
                **options,
            }
        )
        self.tokenizer = self.driver.llm.get_tokenizer()

    def prompt(self, order: list[int]) -> list[int]:
        return prompt(self, order, size=self.case.block_size)


@pytest.fixture(scope="module", params=CASES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ShapeRig, Reference]]:
    """An engine, and the same weights, rounded to bfloat16, in float32."""
    from transformers import AutoModelForCausalLM

    case = CASES[request.param]
    folder = case.save(tmp_path_factory.mktemp("tiny"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    model.config.sliding_window = 4096  # of no layer, but transformers asks
    rig = ShapeRig(case, folder)
    yield rig, Reference(model.float().eval())
    rig.driver.close()


@pytest.mark.parametrize("frame", ["prefix", "none"])
def test_cold_warm_chunked_and_mixed_equal_the_reference(
    both: tuple[ShapeRig, Reference], frame: Any
) -> None:
    rig, reference = both
    options = SpanOptions(frame=frame)
    ids = rig.prompt([0, 1, 2, 3, 4])
    others = [rig.prompt([3, 1]), rig.prompt([4, 0, 2])]
    plain = [token for token in ids if token not in MARKERS.values()]

    def exact(tokens: list[int], spans: SpanOptions | None) -> torch.Tensor:
        table = None if spans is None else parse_segments(tokens, rig.config, spans)
        return reference.logits(tokens, table)[-1].double().log_softmax(-1)

    want = exact(ids, options)
    rig.reset()
    _, cold, cached = rig.run(ids, options)
    assert cached == 0
    _, warm, cached = rig.run(ids, options)
    size = rig.case.block_size
    assert cached == (len(ids) - 1) // size * size
    chunked = rig.run_in_chunks(ids, options, 57)
    rig.reset()
    busy = rig.submit(others[0], options, 40)
    handles = [rig.submit(ids, options), rig.submit(others[1], options), rig.submit(plain, None)]
    _, mixed, _ = rig.read(handles[0])
    _, other, _ = rig.read(handles[1])
    _, ordinary, _ = rig.read(handles[2])
    rig.read(busy)

    runs = {"cold": cold, "warm": warm, "chunked": chunked, "mixed": mixed}
    far = {name: kl(want, one) for name, one in runs.items()}
    far |= {
        "another": kl(exact(others[1], options), other),
        "ordinary": kl(exact(plain, None), ordinary),
    }
    apart = {name: kl(cold, one) for name, one in runs.items()}
    wrong = kl(exact(ids, SpanOptions(frame=frame, offsets="padded")), cold)
    for name, values in (("KL of reference", far), ("KL of cold", apart)):
        print(name, {key: f"{value:.1e}" for key, value in values.items()})
    print(f"KL of other offsets {wrong:.1e}")
    assert max(far.values()) < rig.case.reference_kl
    assert max(apart.values()) < RUNS_KL
    assert wrong > 3 * rig.case.reference_kl  # these limits tell right from wrong


def test_decode_follows_the_reference(both: tuple[ShapeRig, Reference]) -> None:
    """24 greedy tokens: each the reference's choice, or one that rounding may prefer."""
    rig, reference = both
    options = SpanOptions()
    rig.reset()
    prompts = [rig.prompt(order) for order in ([0, 1, 2, 3, 4], [2, 0])]
    handles = [rig.submit(ids, options, 24) for ids in prompts]
    for ids, handle in zip(prompts, handles, strict=True):
        tokens, _, _ = rig.read(handle)
        whole = [*ids, *tokens]
        logits = reference.logits(whole, parse_segments(whole, rig.config, options))
        rows = logits[len(ids) - 1 : -1].double().log_softmax(-1)
        chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        gap = float((rows.max(-1).values - chosen).max())
        print(f"largest gap to the reference's choice: {gap:.3f}")
        assert gap < 0.3
