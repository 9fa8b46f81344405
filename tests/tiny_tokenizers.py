"""Tokenizers made on the spot: each has a habit that SmolLM2's has not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

LLAMA_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)

# Trims every content, folds the system message into the first user message.
LLAMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% set fold = '' %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set fold = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if loop.first %}{{ fold }}{% endif %}{{ message['content'] | trim }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def byte_level(
    specials: Sequence[str | AddedToken], template: str | None, bos: str | None, **tokens: str
) -> Any:
    """One token a byte; `bos` stands in front of every text, as in Llama 3."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(PreTrainedTokenizerFast, backend, specials, template, bos, tokens)


def metaspace(specials: Sequence[str | AddedToken], template: str | None, bos: str) -> Any:
    """One token a character, and a space in front of the text, there only, as in Llama 2."""
    from transformers import PreTrainedTokenizerFast

    chars = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), "▁a"]
    vocab = {char: i for i, char in enumerate(chars)}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return _finish(
        PreTrainedTokenizerFast, backend, specials, template, bos, {"unk_token": "<unk>"}
    )


def _finish(
    kind: Any,
    backend: Tokenizer,
    specials: Sequence[str | AddedToken],
    template: str | None,
    bos: str | None,
    tokens: dict[str, str],
) -> Any:
    for token in specials:
        if isinstance(token, str) or token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
        tokens["bos_token"] = bos
    tokenizer = kind(tokenizer_object=backend, **tokens)
    tokenizer.chat_template = template
    return tokenizer


class SlowTokenizer:
    """No backend: one token a character, by code point. `<s>` and the like come first."""

    name_or_path = "slow"
    specials = ("<s>", "</s>", "<unused_0>", "<unused_1>", "<unused_2>", "<turn>")
    bos_token_id, eos_token_id = 0, 1
    chat_template = "(see apply_chat_template)"

    def __init__(self, *, obedient: bool = True) -> None:
        self._obedient = obedient
        self.added_tokens_decoder = {
            i: SimpleNamespace(
                content=text, special=True, lstrip=False, rstrip=text == "<turn>", single_word=False
            )
            for i, text in enumerate(self.specials)
        }

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        ids = [self.bos_token_id] if add_special_tokens else []
        while text:
            found = next((s for s in self.specials if text.startswith(s)), None)
            if found and not (split_special_tokens and self._obedient):
                ids.append(self.specials.index(found))
                text = text[len(found) :]
            else:
                ids.append(1000 + ord(text[0]))
                text = text[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.specials[i] if i < 1000 else chr(i - 1000) for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.specials)}

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> str:
        turns = "".join(f"<turn> {message['content']}" for message in messages)
        return "<s>" + turns + ("<turn> answer:" if options["add_generation_prompt"] else "")
