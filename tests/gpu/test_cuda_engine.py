"""The whole engine on a GPU, with a real small model, held against the reference.

bf16 weights and keys on both sides of each comparison of runs; the reference is float32 on the
GPU. Tolerances: an ordinary prompt's KL from the reference is about 1e-3 (bf16 has 8 bits of
mantissa, 30 layers), a wrong position or mask gives 1e-1 and more. 1e-2 lies between. Two runs of
the engine that differ in kernels only agree to 5e-3 in the mean over several prompts; one prompt
by itself may show the noise of both, up to 7e-3 where nothing is fused (measured, eager).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from reference import Reference

from minipic_backend.config import CONFIG_KEY, SpanConfig, SpanOptions
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.models import ensure_smollm2
from minipic_backend.plugin import register
from minipic_backend.spans.patches import Patch
from minipic_backend.spans.segments import SegmentKind, parse_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZE = 16
MARKERS = {"ssep": 3, "pdep": 4, "pad": 5}
REFERENCE_KL = 1e-2
RUNS_KL = 5e-3
ORDERS = ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2], [2, 4, 0, 3])
VARIANTS = [
    ("span_local", False),
    ("unrotated", False),
    ("span_local", True),
]
OPTIONS = [
    SpanOptions(frame=frame, offsets=offsets)
    for frame in ("prefix", "none")
    for offsets in ("compact", "padded")
]


class Rig:
    def __init__(self, encoding: str, eager: bool) -> None:
        register()
        self.config = SpanConfig(**MARKERS, block_size=SIZE, key_encoding=encoding)  # type: ignore[arg-type]
        self.driver = EngineDriver(
            {
                "model": str(ensure_smollm2(progress=False)),
                "enforce_eager": eager,
                "max_model_len": 4096,
                "max_num_seqs": 16,
                "gpu_memory_utilization": 0.1,
                "kv_cache_memory_bytes": 2**30,
                "max_logprobs": -1,
                "additional_config": {CONFIG_KEY: {**MARKERS, "key_encoding": encoding}},
            }
        )
        self.tokenizer = self.driver.llm.get_tokenizer()

    @property
    def scheduler(self) -> Any:
        return self.driver.llm.engine_core.engine_core.scheduler

    def submit(self, ids: Sequence[int], options: SpanOptions | None, count: int = 1) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            logprobs=self.tokenizer.vocab_size if count == 1 else 1,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            extra_args={CONFIG_KEY: options.to_dict()} if options else None,
        )
        return self.driver.submit(ids, params)

    def read(self, handle: Any) -> tuple[list[int], Any, int]:
        """Tokens, log-probabilities behind the prompt [vocab], cached tokens."""
        tokens: list[int] = []
        first: Any = None
        cached = 0
        for delta in handle.deltas():
            output = delta.outputs[0]
            tokens += output.token_ids
            if first is None and output.logprobs:
                row = output.logprobs[0]
                if len(row) > 2:
                    values = [row[i].logprob for i in range(self.tokenizer.vocab_size)]
                    first = torch.tensor(values, dtype=torch.float64)
            cached = delta.num_cached_tokens or 0
        return tokens, first, cached

    def run(self, ids: Sequence[int], options: SpanOptions | None, count: int = 1) -> Any:
        return self.read(self.submit(ids, options, count))

    def run_in_chunks(self, ids: Sequence[int], options: SpanOptions, size: int) -> Any:
        """Log-probabilities behind a prompt that is computed from nothing, `size` tokens a step."""
        self.reset()
        before = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = size
        try:
            _, row, cached = self.run(ids, options)
        finally:
            self.scheduler.max_num_scheduled_tokens = before
        assert cached == 0
        return row

    def reset(self) -> None:
        assert self.driver.call(lambda llm: llm.reset_prefix_cache())


@pytest.fixture(
    scope="module", params=VARIANTS, ids=lambda v: f"{v[0]}-{'eager' if v[1] else 'graphs'}"
)
def rig(request: Any) -> Iterator[Rig]:
    made = Rig(*request.param)
    yield made
    made.driver.close()


TEXTS = [
    f"{name} is a town of {count} people on the river {river}. It has {what}, and its market is "
    f"held on {day}." + extra
    for name, count, river, what, day, extra in [
        ("Arlen", "4,210", "Mose", "a stone bridge", "Mondays", ""),
        ("Berrow", "980", "Tarn", "two mills and an old school", "Fridays", " The mills are shut."),
        ("Calder", "15,002", "Isk", "a castle", "Sundays", ""),
        ("Dunmore", "77", "Ouse", "nothing to speak of", "no day", " People leave early. " * 4),
        ("Eskdale", "6,543", "Esk", "a railway museum", "Tuesdays", ""),
    ]
]


def prompt(
    rig: Rig, order: Sequence[int], question: str = "Which town has a castle?", size: int = SIZE
) -> list[int]:
    def encode(text: str) -> list[int]:
        return list(rig.tokenizer.encode(text, add_special_tokens=False))

    def filled(ids: list[int], filler: int) -> list[int]:
        return ids + [filler] * (-len(ids) % size)

    ids = filled(encode("<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\n"), 198)
    for index in order:
        ids += filled([3, *encode(TEXTS[index] + "\n\n")], 5)
    ids += filled([4, *encode("These are towns.\n")], 5)
    ids += filled([3, *encode(TEXTS[0] + "\n\n")], 5)
    return [*ids, 4, *encode(f"Question: {question}<|im_end|>\n<|im_start|>assistant\n")]


def patched(rig: Rig, order: Sequence[int], options: SpanOptions, num_blocks: int) -> Any:
    """The prompt with the first blocks of each of its documents computed anew (EPIC)."""
    ids = prompt(rig, order)
    table = parse_segments(ids, rig.config, options)
    question = table.last.start  # type: ignore[union-attr]
    front, patches = ids[:question], []
    for segment in table.segments:  # type: ignore[union-attr]
        if segment.kind is SegmentKind.SPAN:
            end = min(segment.start + num_blocks * SIZE, segment.end)
            patches.append(Patch(len(front), segment.start, end))
            front += ids[segment.start : end]
    return front + ids[question:], replace(options, patches=tuple(patches))


def kl(want: Any, got: Any) -> float:
    return float((want.exp() * (want - got)).sum())


def mean_kl(want: Sequence[Any], got: Sequence[Any]) -> float:
    """Over prompts; each list has one row of log-probabilities a prompt."""
    return mean(map(kl, want, got))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.frame}-{o.offsets}")
def test_cold_and_warm_equal_the_reference(rig: Rig, reference: Reference, options: Any) -> None:
    runs: dict[str, list[Any]] = {"want": [], "cold": [], "warm": []}
    for order in ORDERS:
        rig.reset()
        ids = prompt(rig, order)
        table = parse_segments(ids, rig.config, options)
        runs["want"].append(reference.logits(ids, table)[-1].double().log_softmax(-1))
        _, cold, cached = rig.run(ids, options)
        assert cached == 0
        _, warm, cached = rig.run(ids, options)
        assert cached == len(ids) // SIZE * SIZE
        runs["cold"].append(cold)
        runs["warm"].append(warm)
        print(f"KL cold {kl(runs['want'][-1], cold):.2e} runs {kl(cold, warm):.2e}")
        assert max(kl(runs["want"][-1], one) for one in (cold, warm)) < REFERENCE_KL
    assert mean_kl(runs["cold"], runs["warm"]) < RUNS_KL


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.frame}-{o.offsets}")
def test_patches_equal_the_reference(
    rig: Rig, reference: Reference, options: Any, num_blocks: int
) -> None:
    """Cold, warm, in chunks, and decoded behind, through graphs where there are any."""
    runs: dict[str, list[Any]] = {"cold": [], "warm": [], "chunked": []}
    for order in ORDERS:
        ids, patches = patched(rig, order, options, num_blocks)
        table = parse_segments(ids, rig.config, patches)
        want = reference.logits(ids, table)[-1].double().log_softmax(-1)
        rig.reset()
        _, cold, cached = rig.run(ids, patches)
        assert cached == 0
        _, warm, cached = rig.run(ids, patches)
        assert cached == len(ids) // SIZE * SIZE
        chunked = rig.run_in_chunks(ids, patches, 57)
        for name, one in zip(runs, (cold, warm, chunked), strict=True):
            runs[name].append(one)
        far = [kl(want, one) for one in (cold, warm, chunked)]
        print("KL cold, warm, chunked", [f"{value:.2e}" for value in far])
        assert max(far) < REFERENCE_KL
    assert mean_kl(runs["cold"], runs["warm"]) < RUNS_KL
    assert mean_kl(runs["cold"], runs["chunked"]) < RUNS_KL
    options = patches
    tokens, _, _ = rig.run(ids, options, 16)
    whole = [*ids, *tokens]
    rows = reference.logits(whole, parse_segments(whole, rig.config, options))
    rows = rows[len(ids) - 1 : -1].double().log_softmax(-1)
    chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert (rows.max(-1).values - chosen).max() < 0.5


def test_ordinary_prompt_equals_the_reference(rig: Rig, reference: Reference) -> None:
    ids = [token for token in prompt(rig, range(5)) if token not in MARKERS.values()]
    want = reference.logits(ids, None)[-1].double().log_softmax(-1)
    _, got, _ = rig.run(ids, None)
    print(f"KL ordinary {kl(want, got):.2e}")
    assert kl(want, got) < REFERENCE_KL


def test_permuted_documents_are_hits_and_equal_cold(rig: Rig) -> None:
    warm, cold = [], []
    for order in ORDERS[1:]:
        rig.reset()
        rig.run(prompt(rig, range(5)), SpanOptions())
        ids = prompt(rig, order)
        _, found, cached = rig.run(ids, SpanOptions())
        warm.append(found)
        # All but the dependent text behind the documents, and what follows it.
        assert cached > 0.6 * len(ids)
        rig.reset()
        _, found, cached = rig.run(ids, SpanOptions())
        cold.append(found)
        assert cached == 0
    assert mean_kl(cold, warm) < RUNS_KL


@pytest.mark.parametrize("chunk", [17, 64, 100])
def test_chunked_equals_whole(rig: Rig, chunk: int) -> None:
    whole, chunked = [], []
    for order in ORDERS:
        ids = prompt(rig, order)
        rig.reset()
        whole.append(rig.run(ids, SpanOptions())[1])
        chunked.append(rig.run_in_chunks(ids, SpanOptions(), chunk))
    assert mean_kl(whole, chunked) < RUNS_KL


def test_mixed_batch_equals_alone(rig: Rig) -> None:
    ids = [prompt(rig, order) for order in ([0, 1, 2], [4, 3], [2, 1, 0, 3, 4])]
    plain = [token for token in ids[0] if token not in MARKERS.values()]
    alone = []
    for each, options in [*((i, SpanOptions()) for i in ids), (plain, None)]:
        rig.reset()
        alone.append(rig.run(each, options)[1])
    rig.reset()
    busy = rig.submit(ids[0], SpanOptions(frame="none"), 40)
    handles = [rig.submit(i, SpanOptions()) for i in ids] + [rig.submit(plain, None)]
    together = [rig.read(handle)[1] for handle in handles]
    rig.read(busy)
    assert mean_kl(alone, together) < RUNS_KL


def test_questions_are_one_graph(rig: Rig, reference: Reference, monkeypatch: Any) -> None:
    """A question behind cached documents replays one graph, alone and beside others and decodes,
    and says what it says without it, and what the reference says."""
    manager, runner = rig.driver.call(
        lambda llm: llm.collective_rpc(
            lambda worker: (worker.model_runner.cudagraph_manager, worker.model_runner)
        )[0]
    )
    replayed: list[int] = []
    run = type(manager).run_fullgraph

    def note(desc: Any) -> Any:
        if desc.uniform_token_count is None:
            replayed.append(desc.num_tokens)
        return run(manager, desc)

    monkeypatch.setattr(manager, "run_fullgraph", note)
    options = SpanOptions()
    rig.reset()
    prompts = [prompt(rig, order) for order in ORDERS]
    tables = [parse_segments(ids, rig.config, options) for ids in prompts]
    for ids in prompts:
        rig.run(ids, options)

    def ask() -> list[Any]:
        replayed.clear()
        alone = [rig.run(ids, options)[1] for ids in prompts]
        busy = rig.submit(prompts[0], options, 60)
        handles = [rig.submit(ids, options) for ids in prompts]
        together = [rig.read(handle)[1] for handle in handles]
        rig.read(busy)
        return alone + together

    with_graphs = ask()
    sizes = list(replayed)
    monkeypatch.setattr(runner, "_suits_question_graph", lambda state: False)
    without = ask()
    assert replayed == []
    print("question graphs", sizes)
    assert bool(sizes) is bool(manager.question_descs)
    assert bool(sizes) is not rig.driver.llm.vllm_config.model_config.enforce_eager
    if sizes:  # each prompt alone, and at least one step of several
        num_left = [len(ids) % SIZE for ids in prompts]
        assert len(sizes) >= len(prompts) + 1
        assert all(size >= left for size, left in zip(sizes, num_left, strict=False))
    for ids, table, one, two in zip(prompts * 2, tables * 2, with_graphs, without, strict=True):
        want = reference.logits(ids, table)[-1].double().log_softmax(-1)
        print(f"KL with graph {kl(want, one):.2e}, without {kl(want, two):.2e}")
        assert kl(want, one) < REFERENCE_KL
    assert mean_kl(without, with_graphs) < RUNS_KL


def test_decode_follows_the_reference(rig: Rig, reference: Reference) -> None:
    """32 greedy tokens, through FULL graphs where there are any: each must be the reference's
    choice, or within what bf16 may turn."""
    rig.reset()
    options = SpanOptions()
    prompts = [prompt(rig, order) for order in ([0, 1, 2, 3, 4], [2, 0], [4, 4, 1])]
    handles = [rig.submit(ids, options, 32) for ids in prompts]
    for ids, handle in zip(prompts, handles, strict=True):
        tokens, _, _ = rig.read(handle)
        whole = [*ids, *tokens]
        logits = reference.logits(whole, parse_segments(whole, rig.config, options))
        rows = logits[len(ids) - 1 : -1].double().log_softmax(-1)
        chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        gap = (rows.max(-1).values - chosen).max()
        print(f"largest gap to the reference's choice: {float(gap):.3f}")
        assert gap < 0.5
