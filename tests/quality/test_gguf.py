"""Any GGUF file as a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from minipic_backend.errors import ConfigurationError, ModelNotFoundError
from minipic_backend.models import ensure_gguf, ensure_smollm2, resolve_model
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
    texts = [t.decode(t.encode("Plain words, <|im_start|> and a name.")) for t in tokenizers]
    assert texts[0] == texts[1]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        ensure_gguf(tmp_path / "none.gguf")
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"nothing of it")
    with pytest.raises(ConfigurationError, match="float8"):
        ensure_gguf(file, "float8")
    with pytest.raises(ConfigurationError, match=r"cannot read bad\.gguf"):
        ensure_gguf(file)
