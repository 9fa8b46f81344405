"""Models whose positions or attention do not allow spans are refused at start-up, by name and
reason; others next to them are taken. All of them tiny, with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny

from minipic_backend import Engine, UnsupportedModelError

ROTARY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 2}, "ALiBi"),
    "rotary embedding inside of transformers' own code": (
        "gpt_neox",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 512,
        },
        "transformers",
    ),
    "learned positions": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512},
        "learned",
    ),
    "sliding window": ("mistral", ROTARY | {"sliding_window": 128}, "sliding"),
    "some layers with a sliding window": (
        "gemma3_text",
        ROTARY | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
        "sliding|full attention",
    ),
    "dynamic rotary scaling": (
        "llama",
        ROTARY
        | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "Dynamic",
    ),
}
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3 rotary scaling": (
        "llama",
        ROTARY
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
            }
        },
    ),
    "yarn": (
        "llama",
        ROTARY
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
            }
        },
    ),
    "rotary embedding of a part of each head": (
        "llama",
        ROTARY
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "neighbouring rotary pairs": (
        "gptj",
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "rotary_dim": 16},
    ),
}


def start(folder: str, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", max_model_len=512, kv_cache_gib=0.05, **options)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refused(model: str, tmp_path: Path, name: str) -> None:
    kind, settings, reason = UNSUPPORTED[name]
    folder = save_tiny(tmp_path, model, kind, **settings)
    with pytest.raises(UnsupportedModelError) as caught:
        start(folder)
    message = str(caught.value)
    assert folder in message
    assert re.search(reason, message)


@pytest.mark.parametrize("name", SUPPORTED)
def test_taken(model: str, tmp_path: Path, name: str) -> None:
    """Cold, warm and chunked, and with both key encodings: two ways to the same logits, which a
    factor of the rotary table that entered once too often would keep apart."""
    from check import PREFILL, distance
    from prompts import PromptMaker, join
    from rig import Rig

    kind, settings = SUPPORTED[name]
    folder = save_tiny(tmp_path, model, kind, **settings)
    answers = []
    for encoding in ("span_local", "unrotated"):
        with start(folder, key_encoding=encoding) as engine:
            rig = Rig(engine._driver, engine)
            make = PromptMaker(engine.tokenizer, rig.config)
            spans = make.spans(3)
            prompt = join(make.prefix(), *spans, make.question())
            cold = rig.run(prompt)
            warm = rig.run(prompt)
            assert warm.cached_tokens == len(prompt) - len(make.question())
            rig.reset()
            with rig.chunked(33):
                chunked = rig.run(prompt)
            ordinary = rig.run(make.encode("An ordinary prompt, of some length." * 5))
            answers.append((cold.logprobs, ordinary.logprobs))
            (rotary,) = {id(r): r for r in _rotaries(rig)}.values()
            assert (rotary.rotary_dim < 32) == ("part" in name or "pairs" in name)
            assert (rotary.mscale != 1.0) == (name == "yarn")
            assert rotary.is_neox == ("pairs" not in name)
            for other in (warm, chunked):
                assert distance(other.logprobs, cold.logprobs) < PREFILL["float32"]
            turned = rig.run(join(make.prefix(), *reversed(spans), make.question()))
            assert distance(turned.logprobs, cold.logprobs) > 1e-2
    for one, other in zip(*answers, strict=True):
        assert distance(one, other) < PREFILL["float32"]


def _rotaries(rig: Any) -> list[Any]:
    """What the attention layers were given."""
    layers = rig.runner.compilation_config.static_forward_context.values()
    return [layer.impl.rotary for layer in layers]
