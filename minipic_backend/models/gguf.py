"""Any GGUF file that transformers knows how to read, as a folder that vLLM serves.

Converted once, into the user's cache: weights de-quantized, tokenizer and chat template rebuilt
from the file's own metadata.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError, ModelNotFoundError
from minipic_backend.models.cache import build_once, cache_dir

__all__ = ["ensure_gguf", "is_gguf"]

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_RECIPE = 1  # raise it when the conversion changes: older cached folders are then left alone
_DTYPES = ("bfloat16", "float16", "float32")


def is_gguf(name: str) -> bool:
    """Whether a model's name is a GGUF file on this machine."""
    return name.casefold().endswith(".gguf") and Path(name).is_file()


def ensure_gguf(path: Path, dtype: str = "bfloat16") -> Path:
    """The model of a GGUF file as a folder that transformers and vLLM load.

    Converted on the first call (seconds to minutes; memory for the weights in `dtype`, twice).

    Args:
        path: the file.
        dtype: of the weights: "bfloat16", "float16" or "float32".

    Raises:
        ModelNotFoundError: no such file.
        ConfigurationError: unknown dtype, the package `gguf` is missing, or transformers cannot
            read this architecture.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype={dtype!r}: choose one of {', '.join(_DTYPES)}")
    if not path.is_file():
        raise ModelNotFoundError(f"No such file: {path}")
    name = f"gguf-{path.stem}-{_fingerprint(path)}-{dtype}-{_RECIPE}"
    return build_once(cache_dir() / name, _FILES, lambda folder: _convert(path, folder, dtype))


def _fingerprint(path: Path) -> str:
    """Tells files apart by size and first MiB, which holds the metadata: no need to read it all."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(2**20))
    digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()[:12]


def _convert(path: Path, folder: Path, dtype: str) -> None:
    try:
        import gguf  # noqa: F401  transformers needs it
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"Reading GGUF files needs one more package ({error}): pip install 'minipic[demo]'"
        ) from error
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(
            **place, dtype=getattr(torch, dtype), **_dequantized()
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigurationError(f"transformers cannot read {path.name}: {error}") from error
    tied = set(model.all_tied_weights_keys or ())
    weights = {
        name: tensor.detach().to(getattr(torch, dtype)).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    config |= {"architectures": [type(model).__name__], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: config[key] for key in ids if config.get(key) is not None}
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    tokenizer.save_pretrained(folder)


def _dequantized() -> dict[str, Any]:
    """Newer releases of transformers keep the weights packed unless told otherwise."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
