"""An adapter as `minipic adapt` saves it, served by the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from minipic_backend import Engine, ModelNotFoundError, Prompt, PromptError, Span, Text

PROMPT = Prompt([Text("Read this."), Span("Arlen is a town by the river."), Text("Which town?")])
GREEDY: dict[str, Any] = {
    "technique": "block_attention", "temperature": 0.0, "max_tokens": 4, "ignore_eos": True,
    "logprobs": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[str, str, str]:
    """A tiny model, a random adapter of it, and both merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapter")
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    tiny = save_tiny(root / "tiny", model, "llama", **shape, num_attention_heads=2,
                     num_key_value_heads=1, initializer_range=0.1)  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(loaded, config)
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    adapted.save_pretrained(str(root / "lora"))
    merged = root / "merged"
    adapted.merge_and_unload().save_pretrained(merged)
    for path in Path(tiny).glob("tokenizer*"):
        (merged / path.name).write_bytes(path.read_bytes())
    return tiny, str(root / "lora"), str(merged)


def test_an_adapter_is_what_it_is_merged(folders: tuple[str, str, str]) -> None:
    tiny, lora, merged = folders
    found = []
    for model, adapter in ((tiny, None), (tiny, lora), (merged, None)):
        options = {"max_model_len": 512, "kv_cache_gib": 0.05, "dtype": "float32"}
        with Engine(model, adapter=adapter, **options) as engine:
            cold, warm = (engine.generate(PROMPT, **GREEDY) for _ in range(2))
            assert cold.token_ids == warm.token_ids
            assert warm.usage.cached_tokens
            if adapter is not None:
                with pytest.raises(PromptError, match="prompt_logprobs"):
                    engine.generate(PROMPT, **GREEDY, prompt_logprobs=1)
            rows = engine.explain(PROMPT, technique="block_attention").rows
            assert [row.state for row in rows[:-1]] == ["warm"] * (len(rows) - 1)
            found.append(cold)
    plain, adapted, as_one = found
    assert adapted.token_ids == as_one.token_ids
    first, other = (one.completions[0].logprobs[0] for one in (adapted, as_one))  # type: ignore[index]
    shared = set(first) & set(other)
    assert len(shared) >= 4
    assert max(abs(first[token] - other[token]) for token in shared) < 1e-2
    before = plain.completions[0].logprobs[0]  # type: ignore[index]
    assert (plain.token_ids, before) != (adapted.token_ids, first)


def test_no_adapter_there(folders: tuple[str, str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="adapter"):
        Engine(folders[0], adapter=str(tmp_path))
