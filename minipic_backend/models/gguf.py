"""Any GGUF file that transformers knows how to read, as a folder that vLLM serves.

Converted once, into the user's cache: weights de-quantized, tokenizer and chat template rebuilt
from the file's own metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipic_backend.errors import ConfigurationError, ModelNotFoundError, shown
from minipic_backend.models.cache import build_once, cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["declare_special_tokens", "ensure_gguf", "is_gguf"]

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_RECIPE = 2  # raise it when the conversion changes: older cached folders are then left alone
_TOKEN_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
}
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types of special and of other added tokens
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
        raise ConfigurationError(f"dtype={shown(dtype)}: choose one of {', '.join(_DTYPES)}")
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
        import torch
        from gguf import GGUFReader
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
    facts = {
        name.removeprefix("tokenizer.ggml."): field
        for name, field in GGUFReader(path).fields.items()
        if name.startswith("tokenizer.ggml.")
    }
    tokens, types = (facts[name].contents() for name in ("tokens", "token_type"))
    declare_special_tokens(tokenizer, tokens, types)
    ids = {role: facts[name].contents() for role, name in _TOKEN_IDS.items() if name in facts}
    for role, token_id in ids.items():
        setattr(tokenizer, role, tokens[token_id])
    tied = set(model.all_tied_weights_keys or ())
    weights = {
        name: tensor.detach().to(getattr(torch, dtype)).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    token_ids = {f"{role}_id": token_id for role, token_id in ids.items()}
    config |= {"architectures": [type(model).__name__], "dtype": dtype, **token_ids}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    text = json.dumps(token_ids, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    tokenizer.save_pretrained(folder)


def declare_special_tokens(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Tells a tokenizer which of its tokens are special, as the file has it.

    Not every release of transformers does: such tokens then fall apart when text is encoded.

    Args:
        tokenizer: a fast one; keeps its ids.
        tokens: the vocabulary, by id.
        types: GGUF's type of each.
    """
    from transformers import AddedToken

    known = tokenizer.added_tokens_decoder
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (_CONTROL, _USER_DEFINED):
            continue
        special = kind == _CONTROL
        if token_id not in known or known[token_id].special != special:
            added = AddedToken(token, special=special, normalized=False)
            tokenizer.add_tokens([added], special_tokens=special)
    if wrong := [
        i
        for i in tokenizer.added_tokens_decoder
        if i < len(tokens) and tokenizer.added_tokens_decoder[i].content != tokens[i]
    ]:
        raise ConfigurationError(f"The tokenizer's token {wrong[0]} is not the file's")


def _dequantized() -> dict[str, Any]:
    """Newer releases of transformers keep the weights packed unless told otherwise."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
