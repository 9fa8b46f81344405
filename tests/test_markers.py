"""Markers are tokens that the model never uses; where there are none, we say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import LLAMA_SPECIALS, LLAMA_TEMPLATE, byte_level

from minipic_backend.errors import ConfigurationError, MarkerError
from minipic_backend.layout.markers import Markers, choose_markers


def fake(*texts: str, template: Any = None, plain: tuple[str, ...] = (), **more: Any) -> Any:
    """A tokenizer with these special tokens, ids from 100."""
    added = {
        100 + i: SimpleNamespace(content=text, special=text not in plain)
        for i, text in enumerate(texts)
    }
    vocab = {"word": 7} | {token.content: i for i, token in added.items()}
    return SimpleNamespace(
        added_tokens_decoder=added, chat_template=template, get_vocab=lambda: vocab, **more
    )


def chosen(tokenizer: Any, **options: Any) -> tuple[str, ...]:
    markers = choose_markers(tokenizer, **options)
    ids = (markers.ssep, markers.pdep, markers.pad)
    return tuple(tokenizer.added_tokens_decoder[i].content for i in ids)


def test_smollm2(smollm2_tokenizer: Any) -> None:
    assert choose_markers(smollm2_tokenizer) == Markers(3, 4, 5)
    assert choose_markers(smollm2_tokenizer, extra_excluded_ids=[3, 5]) == Markers(4, 6, 7)


def test_llama_takes_reserved_tokens() -> None:
    tokenizer = byte_level(
        LLAMA_SPECIALS, LLAMA_TEMPLATE, LLAMA_SPECIALS[0], eos_token="<|reserved_special_token_1|>"
    )
    reserved = [f"<|reserved_special_token_{i}|>" for i in (0, 2, 3)]
    assert chosen(tokenizer) == tuple(reserved)


def test_reserved_first_then_code_then_grounding_then_infilling() -> None:
    tokenizer = fake(
        "<fim_prefix>", "<|box_start|>", "<repo_name>", "<|reserved_1|>", "<unused7>", "<|user|>"
    )
    assert chosen(tokenizer) == ("<|reserved_1|>", "<unused7>", "<repo_name>")
    assert chosen(tokenizer, extra_excluded_ids=[103, 104]) == (
        "<repo_name>",
        "<|box_start|>",
        "<fim_prefix>",
    )


@pytest.mark.parametrize(
    "never",
    ["<|reserved_image_1|>", "<|extra_think|>", "<unused_tool>", "<|vision_start|>", "<|user|>"],
)
def test_never_tokens_of_another_purpose(never: str) -> None:
    assert never not in chosen(fake(never, "<unused1>", "<unused2>", "<unused3>"))


@pytest.mark.parametrize("role", ["bos", "eos", "pad", "unk", "sep", "cls", "mask"])
def test_never_tokens_with_a_role(role: str) -> None:
    tokenizer = fake(
        "<unused1>", "<unused2>", "<unused3>", "<unused4>", **{f"{role}_token_id": 101}
    )
    assert chosen(tokenizer) == ("<unused1>", "<unused3>", "<unused4>")


@pytest.mark.parametrize(
    "template",
    [
        "{{ '<unused2>' }}",
        {"default": "x", "tool_use": "{{ '<unused2>' }}"},
        [{"name": "default", "template": "x"}, {"name": "rag", "template": "<unused2>"}],
    ],
    ids=["str", "dict", "list"],
)
def test_never_tokens_of_a_chat_template(template: Any) -> None:
    tokenizer = fake("<unused1>", "<unused2>", "<unused3>", "<unused4>", template=template)
    assert "<unused2>" not in chosen(tokenizer)


def test_tokens_not_flagged_special_only_where_the_name_says_unused() -> None:
    """Gemma's <unused0> is not flagged special; Qwen's <|fim_prefix|> is not either, but in use."""
    names = ("<unused0>", "<unused1>", "<unused2>", "<|fim_prefix|>")
    assert chosen(fake(*names, plain=names)) == names[:3]
    with pytest.raises(MarkerError):
        choose_markers(fake(*names[1:], plain=names))


def test_grounding_tokens_are_in_use_where_the_template_knows_images() -> None:
    names = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>")
    assert chosen(fake(*names)) == names
    with pytest.raises(MarkerError):
        choose_markers(fake(*names, template="{% if image %}<|vision_start|>{% endif %}"))


def test_too_few_says_what_to_do() -> None:
    tokenizer = fake("<s>", "</s>", "<unused1>", name_or_path="acme/tiny", bos_token_id=100)
    with pytest.raises(MarkerError, match=r"acme/tiny has 1 \(<unused1>\)[\s\S]*markers="):
        choose_markers(tokenizer)
    with pytest.raises(MarkerError, match="none"):
        choose_markers(SimpleNamespace(get_vocab=dict))  # type: ignore[arg-type]
    assert issubclass(MarkerError, ConfigurationError)


def test_configured() -> None:
    tokenizer = fake("<a>", "<b>", "<c>", "<d>", eos_token_id=103)
    assert choose_markers(tokenizer, configured=("<c>", 100, "<b>")) == Markers(102, 100, 101)
    assert choose_markers(tokenizer, configured=Markers(101, 7, 100)) == Markers(101, 7, 100)


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (("<a>", "<b>"), "three tokens"),
        ("<a>", "three tokens"),
        (("<a>", "<b>", "<x>"), "no token '<x>'"),
        (("<a>", "<b>", 99_999), "no token 99999"),
        (("<a>", "<b>", "<a>"), "three different"),
        (("<a>", "<b>", "<d>"), "'<d>' is the eos_token"),
        (("<a>", "<b>", "<e>"), "'<e>' occurs in the chat template"),
        (("<a>", "<b>", "<f>"), "'<f>' ends the generation"),
    ],
)
def test_configured_wrongly(configured: Any, message: str) -> None:
    tokenizer = fake("<a>", "<b>", "<c>", "<d>", "<e>", "<f>", eos_token_id=103, template="<e>")
    with pytest.raises(MarkerError, match=message):
        choose_markers(tokenizer, configured=configured, extra_excluded_ids=[105])
