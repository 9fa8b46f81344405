"""Any GGUF file as a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minipic_backend.errors import ConfigurationError, ModelNotFoundError
from minipic_backend.layout.markers import choose_markers
from minipic_backend.models import ensure_gguf, ensure_smollm2, resolve_model
from minipic_backend.models.gguf import declare_special_tokens
from minipic_backend.models.smollm2 import find_gguf


def test_it_is_converted_as_smollm2_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' reader and ours, which knows SmolLM2 alone, find the same weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    ours = ensure_smollm2(progress=False)
    source = find_gguf()
    assert source is not None
    monkeypatch.setenv("MINIPIC_CACHE", str(tmp_path))
    folder = Path(resolve_model(str(source)))
    assert folder.is_relative_to(tmp_path)
    assert ensure_gguf(source) == folder  # from the cache
    found, expected = (load_file(place / "model.safetensors") for place in (folder, ours))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (folder, ours)]
    ids = [t.encode("Plain words, <|im_start|> and <file_sep>.") for t in tokenizers]
    assert ids[0] == ids[1]
    assert choose_markers(tokenizers[0]) == choose_markers(tokenizers[1])
    names = [(t.bos_token, t.eos_token, t.pad_token) for t in tokenizers]
    assert names[0] == names[1]
    generation = [json.loads((p / "generation_config.json").read_text()) for p in (folder, ours)]
    assert generation[0] == generation[1]


def test_special_tokens_are_whole_whatever_transformers_read() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["a", "b", "<", ">", "<a>", "<b>", "Ġ", "ab"]
    types = [1, 1, 1, 1, 3, 4, 1, 1]  # 3: control, 4: user-defined
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("a", "b")])
    plain = Tokenizer(bpe)
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    assert tokenizer.encode("<a>ab<b>") == [2, 0, 3, 7, 2, 1, 3]
    for _ in range(2):  # once more changes nothing
        declare_special_tokens(tokenizer, tokens, types)
        assert tokenizer.encode("<a>ab<b>") == [4, 7, 5]
        flags = {i: token.special for i, token in tokenizer.added_tokens_decoder.items()}
        assert flags == {4: True, 5: False}


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        ensure_gguf(tmp_path / "none.gguf")
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"nothing of it")
    with pytest.raises(ConfigurationError, match="float8"):
        ensure_gguf(file, "float8")
    with pytest.raises(ConfigurationError, match=r"cannot read bad\.gguf"):
        ensure_gguf(file)
