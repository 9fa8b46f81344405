"""Which CUDA graphs are captured, in which order, and which step replays one.

Constructor, `capture` and `dispatch` are vLLM's own; CUDA itself is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from minipic_backend.attention.dispatch import QUESTION_SIZES
from minipic_backend.plugin.cuda_graphs import SpanCudaGraphManager

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
WIDTH = 4


@contextmanager
def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield None


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = SimpleNamespace(sync_prev_onload=lambda: None, join_after_forward=lambda: None)
    stand_ins: dict[str, Any] = {
        "graph_capture": nothing,
        "capture_pool": nothing,
        "set_forward_context": nothing,
        "get_offloader": lambda: offloader,
        "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "is_global_first_rank": lambda: False,
        "has_compiled_submodule": lambda model: True,
        "prepare_inputs_to_capture": lambda *args, **kwargs: (None, None),
        "current_platform": SimpleNamespace(get_global_graph_pool=lambda: None),
        "current_stream": lambda: None,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(cudagraph_utils, name, value)
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(kind=None))


def default_sizes(largest: int) -> list[int]:
    """As vLLM spaces them."""
    few = [size for size in (1, 2, 4) if size <= largest]
    return [*few, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]


class Captures:
    """A manager, what it captures, and with which attention."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        sizes: list[int] | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
        loras: list[int] | None = None,
        most: int = 2048,
        **parallel: int,
    ) -> None:
        sizes = default_sizes(min(2 * max_num_seqs, 512)) if sizes is None else sizes
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=most
            ),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
            ),
            parallel_config=SimpleNamespace(
                **{
                    "tensor_parallel_size": 1,
                    "data_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                }
                | parallel
            ),
            speculative_config=None,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        )
        stock = cudagraph_utils.ModelCudaGraphManager(
            config, torch.device("cpu"), mode, 1, lora_capture_cases=loras
        )
        self.builder = SimpleNamespace(captures=None)
        self.manager: Any = SpanCudaGraphManager.adopt(stock, [self.builder])
        self.runs: list[tuple[str | None, int]] = []

    def capture(self) -> None:
        buffers = SimpleNamespace(
            input_ids=torch.zeros(8192),
            positions=torch.zeros(8192),
            is_padding=torch.zeros(8192, dtype=torch.bool),
        )
        inputs = SimpleNamespace(prepare_dummy_inputs=lambda *args: {})
        self.manager.capture(self._model, inputs, buffers, None, None, None, None)

    def _model(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.runs.append((self.builder.captures, len(input_ids)))
        return torch.zeros(len(input_ids), WIDTH)


@pytest.mark.parametrize("loras", [None, [0, 2]])
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY])
@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        *((n, None) for n in (1, 8, 128, 129, 135, 136, 192, 200, 255, 256, 257, 1024)),
        (64, default_sizes(512)),
        (300, [1, 2, 4]),
        (8, [4, 400]),
    ],
)
def test_the_largest_run_of_a_capture_comes_first(
    max_num_seqs: int, sizes: list[int] | None, mode: CUDAGraphMode, loras: list[int] | None
) -> None:
    """vLLM makes the buffer for hidden states in the size of the first run, whatever its mode."""
    case = Captures(max_num_seqs=max_num_seqs, sizes=sizes, mode=mode, loras=loras)
    before = case.manager._capture_descs
    stock = {mode: list(descs) for mode, descs in before.items()}
    case.capture()
    largest = max(size for _, size in case.runs)
    assert case.runs[0][1] == largest
    assert case.manager.hidden_states.shape == (largest, WIDTH)
    assert case.manager._capture_descs is before
    assert before == stock
    assert case.builder.captures is None
    assert case.manager.graphs is case.manager.stock_graphs
    full = set(stock.get(FULL, []))
    questions = set(case.manager.question_descs)
    assert set(case.manager.stock_graphs) == full
    assert set(case.manager.span_graphs) == full | questions
    sizes_asked = {desc.num_tokens for desc in questions}
    assert sizes_asked == (set(QUESTION_SIZES) if full else set())
    assert all(desc.num_reqs == min(desc.num_tokens, max_num_seqs) for desc in questions)
    wanted = {(None, desc.num_tokens) for descs in stock.values() for desc in descs}
    wanted |= {("decode", desc.num_tokens) for desc in full}
    wanted |= {("question", size) for size in sizes_asked}
    assert set(case.runs) == wanted


def test_a_step_gets_the_smallest_question_graph_that_holds_it() -> None:
    case = Captures(loras=[0, 2], mode=CUDAGraphMode.FULL_DECODE_ONLY)
    manager = case.manager
    manager.select(spans=True, questions=True)
    assert manager.dispatch(1, 50, None, 0).cg_mode.name == "NONE"  # nothing is captured yet
    case.capture()
    for num_tokens, size in ((2, 16), (16, 16), (17, 32), (50, 64), (256, 256)):
        manager.select(spans=True, questions=True)
        for loras, num_active in ((0, 0), (1, 2), (2, 2)):
            desc = manager.dispatch(1, num_tokens, None, loras)
            assert (desc.num_tokens, desc.num_active_loras) == (size, num_active)
            assert desc in manager.span_graphs
        for choice in ({"spans": True}, {"spans": False}):
            manager.select(**choice)
            assert manager.dispatch(1, num_tokens, None, 0).cg_mode.name == "NONE"
    manager.select(spans=True, questions=True)
    assert manager.dispatch(1, 257, None, 0).cg_mode.name == "NONE"
    manager.span_graphs.clear()
    assert manager.dispatch(1, 50, None, 0).cg_mode.name == "NONE"


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": PIECEWISE},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"most": 15},
    ],
)
def test_where_there_are_no_question_graphs(changes: dict[str, Any]) -> None:
    case = Captures(**changes)
    case.capture()
    assert case.manager.question_descs == []
    assert "question" not in {kind for kind, _ in case.runs}


def test_a_progress_bar_names_the_set_that_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[tuple[str | None, str]] = []

    def bar(descs: Any, desc: str) -> Any:
        named.append((case.builder.captures, desc))
        return descs

    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: True)
    monkeypatch.setattr(cudagraph_utils, "tqdm", bar)
    for max_num_seqs in (8, 256):  # whichever set comes first
        case = Captures(max_num_seqs=max_num_seqs)
        case.capture()
    assert {kind for kind, _ in named} == {None, "decode", "question"}
    assert all((kind is None) == ("spans" not in text) for kind, text in named)
    assert all(kind is None or kind in text for kind, text in named)
