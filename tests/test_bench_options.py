"""Options of the benches: the engine's are the same in all of them, and wrong values are told
before an engine starts."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import pytest

from minipic_backend.bench import command as bench_command
from minipic_backend.bench import cost_command
from minipic_backend.bench.options import engine_args
from minipic_backend.cli import main
from minipic_backend.quality import command as quality_command


@pytest.mark.parametrize(
    ("module", "bench"), [(bench_command, ["ttft"]), (cost_command, []), (quality_command, [])]
)
def test_every_bench_takes_all_options_of_the_engine(module: ModuleType, bench: list[str]) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)

    def read(text: str) -> dict[str, Any]:
        return engine_args(parser.parse_args([*bench, *text.split()]))

    assert read("") == {}
    given = "--max-model-len 2048 --max-num-batched-tokens 512 --gpu-memory-utilization 0.5"
    assert read(f"{given} --enforce-eager --graph-sizes 1,8") == {
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "compilation_config": {"cudagraph_capture_sizes": [1, 8]},
    }


def test_the_engine_options_of_the_quality_bench_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started(Exception):
        pass

    def engine(model: str, **arguments: Any) -> Any:
        raise Started(model, arguments)

    monkeypatch.setattr("minipic_backend.engines.embedded.Engine", engine)
    command = "--model m --count 1 --cost-sample 0 --enforce-eager --graph-sizes 4"
    with pytest.raises(Started) as started:
        main(["bench", "quality", *command.split()])
    model, arguments = started.value.args
    assert model == "m"
    assert arguments["enforce_eager"] is True
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [4]}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("ttft --documents 10,x", "argument --documents: 'x': a whole number from 1"),
        ("throughput --samples 0", "argument --samples: '0': a whole number from 1"),
        ("throughput --engine span_local,span", "no engine 'span'; known: stock, "),
        ("throughput --compare stok", "no engine 'stok'; known: stock, "),
        ("throughput --trace random --policy batched,none", "no policy 'none'; known: interleaved"),
        ("throughput --trace random --reuse 0", "'0': a number above 0, or `least`"),
        ("throughput --trace random --cache-share all,a", "'a': a number above 0, or `all`"),
        ("throughput --trace random --max-num-seqs 64,", "'': a whole number from 1"),
        ("decode --decode 1x512,8", "'8': BATCHxCONTEXT[:DOCUMENTS]"),
        ("decode --decode 0x512", "'0x512': BATCHxCONTEXT[:DOCUMENTS]"),
        ("decode --decode 8x116:2,1x115:2", "'1x115:2': 2 documents, and what stands around them"),
        ("decode --graph-sizes 1,-8", "'-8': a whole number from 1"),
        ("cost --document-tokens 10,x", "argument --document-tokens: 'x': a whole number from 1"),
        ("cost --sample 0", "argument --sample: '0': a whole number from 1"),
        ("quality --documents ten", "argument --documents: 'ten': a whole number from 1"),
        ("quality --count -1", "argument --count: '-1': a whole number from 1"),
    ],
)
def test_wrong_values_are_told_before_an_engine_starts(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *command.split()])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("throughput --samples 10,20", "--samples: several only with --trace"),
        ("throughput --trace random --samples 10,20 --reuse 2,3,4", "differ in length"),
        ("ttft --together", "--together: with --compare"),
        ("throughput --together --compare stock --trace random", "--together: not with --trace"),
        ("ttft --compare stock --engine stock", "--compare, --engine: each engine once"),
        ("ttft --engine span_local,span_local", "--compare, --engine: each engine once"),
        ("decode --model shape:huge", "Unknown shape 'huge'; known: llama-3-8b, tiny"),
    ],
)
def test_options_that_do_not_go_together_are_told_in_one_line(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *command.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("minipic bench: ")
    assert told in last
