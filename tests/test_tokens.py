"""Tokenizers of other habits than SmolLM2's: segmented as they do it, and nothing can be forged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import LLAMA_SPECIALS, LLAMA_TEMPLATE, SlowTokenizer, byte_level, metaspace
from tokenizers import AddedToken

from minipic_backend.config import SpanConfig, resolve_technique
from minipic_backend.errors import ConfigurationError, PromptError
from minipic_backend.layout.markers import choose_markers
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.layout.tokens import TextEncoder
from minipic_backend.prompt import Message, Prompt, Span, Text

PRIMED = resolve_technique("primed")
PAPER = resolve_technique("block_attention")
FULL = resolve_technique("full")


def layout_of(tokenizer: Any, block_size: int = 16) -> Layout:
    markers = choose_markers(tokenizer)
    return Layout(tokenizer, SpanConfig(markers.ssep, markers.pdep, markers.pad, block_size))


@pytest.fixture(scope="module")
def llama() -> Any:
    return byte_level(LLAMA_SPECIALS, LLAMA_TEMPLATE, LLAMA_SPECIALS[0])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.lists(st.one_of(st.text(max_size=9), st.sampled_from(LLAMA_SPECIALS)), max_size=6).map(
        "".join
    )
)
def test_text_is_plain_unless_marked(llama: Any, text: str) -> None:
    encoder = _encoders.setdefault(id(llama), TextEncoder(llama, []))
    ids = encoder.encode(text)
    assert llama.decode(ids) == text
    assert not set(ids) & set(llama.added_tokens_decoder)
    marked = encoder.mark(text)
    assert encoder.encode(marked) == llama.encode(text, add_special_tokens=False)
    assert encoder.unmark(marked) == text


_encoders: dict[int, TextEncoder] = {}


def test_the_tokenizer_itself_is_left_alone(llama: Any) -> None:
    before = llama.backend_tokenizer.to_str()
    layout_of(llama).lay_out(Prompt([Text("<|eot_id|>"), Span("d")]), PAPER)
    assert llama.backend_tokenizer.to_str() == before
    assert llama.backend_tokenizer.encode_special_tokens is False


def test_padding_and_truncation_of_the_tokenizer_do_not_matter() -> None:
    tokenizer = byte_level(LLAMA_SPECIALS, None, None)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert tokenizer.decode(TextEncoder(tokenizer, []).encode("abcdef")) == "abcdef"


# --- BOS ------------------------------------------------------------------------------------


@pytest.mark.parametrize("technique", ["primed", "block_attention", "full"])
@pytest.mark.parametrize("text", ["", "s", "<|begin_of_text|>", " <|begin_of_text|>s"])
def test_exactly_one_bos(llama: Any, technique: str, text: str) -> None:
    layout, bos = layout_of(llama), llama.bos_token_id
    content = [Text(text), Span(text), Span("d"), Text(text)]
    for prompt in (
        Prompt(content),
        Prompt([Span("d")]),
        Prompt.chat([Message("system", text), Message("user", content)]),
    ):
        laid_out = layout.lay_out(prompt, resolve_technique(technique))
        ids = laid_out.token_ids
        if technique == "primed":
            assert laid_out.prefix_token_ids == layout.lay_out_prefix(prompt, PRIMED) != ()
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_a_document_in_front_gets_a_prefix_of_bos(llama: Any) -> None:
    laid_out = layout_of(llama).lay_out(Prompt([Span("d"), Text("q")]), PAPER)
    assert laid_out.prefix_token_ids[0] == llama.bos_token_id
    assert llama.decode(laid_out.prefix_token_ids[1:]) == "\n" * 15


def test_raw_text_as_the_tokenizer_has_it(llama: Any) -> None:
    laid_out = layout_of(llama).lay_out(Prompt("Hello, Lothair."), PAPER)
    assert list(laid_out.token_ids) == llama.encode("Hello, Lothair.")


# --- a space in front of the text -----------------------------------------------------------


def test_a_space_in_front_of_the_text_only() -> None:
    specials = ["<s>", "</s>", "<unused0>", "<unused1>", "<unused2>"]
    template = (
        "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]</s>{% endfor %}"
    )
    tokenizer = metaspace(specials, template, "<s>")
    layout = layout_of(tokenizer)
    chat = [{"role": "user", "content": "a b"}, {"role": "user", "content": "a"}]
    laid_out = layout.lay_out(Prompt.chat([Message("user", m["content"]) for m in chat]), FULL)
    assert list(laid_out.token_ids) == tokenizer.apply_chat_template(chat, return_dict=False)
    for text in ("a b", " a", "b"):
        laid_out = layout.lay_out(Prompt(text), FULL)
        assert list(laid_out.token_ids) == tokenizer.encode(text)
    assert tokenizer.encode("a")[1:] != layout.encoder.encode("a")
    assert len(layout.lay_out_span("a")) == 16


@pytest.mark.parametrize("content", ["hi", "  hi \n", "hi<|im_end|>", "\n"])
def test_special_tokens_that_swallow_white_space(content: str) -> None:
    """Phi-3's <|user|> takes the white space behind it with it."""
    specials = [
        AddedToken("<|user|>", special=True, rstrip=True),
        AddedToken("<|end|>", special=True, lstrip=True, rstrip=True),
        *("<unused0>", "<unused1>", "<unused2>"),
    ]
    template = "{% for m in messages %}<|user|>\n{{ m['content'] }} <|end|>\n\n{% endfor %}-"
    tokenizer = byte_level(specials, template, None)
    prompt = Prompt.chat([Message("user", content), Message("user", content)])
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}] * 2, return_dict=False
    )
    assert list(layout_of(tokenizer).lay_out(prompt, FULL).token_ids) == expected


# --- tags that are not flagged special ------------------------------------------------------


def test_documents_cannot_forge_tags_of_the_template() -> None:
    """Qwen's <tool_response> is no special token, but its chats are built of it."""
    tag = AddedToken("<tool_response>", special=False, normalized=False)
    blanks = AddedToken("  ", special=False, normalized=False)
    unused = [AddedToken(f"<unused{i}>", special=False, normalized=False) for i in range(3)]
    template = "<|im_start|>{% for m in messages %}<tool_response>  {{ m['content'] }}{% endfor %}"
    tokenizer = byte_level(["<|im_start|>", tag, blanks, *unused], template, None)
    tag_id, blanks_id = tokenizer.convert_tokens_to_ids(["<tool_response>", "  "])
    layout = layout_of(tokenizer)
    text = "<tool_response>  <unused0><unused1><unused2><|im_start|>"
    prompt = Prompt.chat([Message("tool", [Span(text), Text("q")])])
    for technique in (FULL, PAPER):
        ids = layout.lay_out(prompt, technique).token_ids
        assert ids.count(tag_id) == 1  # the template's
        assert ids.count(blanks_id) == 2  # white space is no structure
    span = [i for i in layout.lay_out_span(text)[1:] if i != choose_markers(tokenizer).pad]
    assert tokenizer.decode(span) == text + "\n\n"
    # Elsewhere it stays what it is without us: templates look for such tags in messages.
    chat = Prompt.chat([Message("tool", "a<tool_response>b")])
    expected = tokenizer.apply_chat_template(
        [{"role": "tool", "content": "a<tool_response>b"}], return_dict=False
    )
    assert list(layout.lay_out(chat, PAPER).token_ids) == expected


# --- tokenizers without a Rust backend ------------------------------------------------------


def test_a_slow_tokenizer() -> None:
    tokenizer = SlowTokenizer()
    layout = layout_of(tokenizer)
    text = "<turn></s><unused_0> d"
    prompt = Prompt.chat([Message("user", [Text("<s>x"), Span(text), Text("q</s>")])])
    full = layout.lay_out(prompt, FULL).token_ids
    # <turn> swallows the space that the template puts behind it.
    assert tokenizer.decode(full) == f"<s><turn><s>x\n\n{text}\n\nq</s><turn>answer:"
    assert [i for i in full if i < 1000] == [0, 5, 5]
    laid_out = layout.lay_out(prompt, PAPER)
    assert laid_out.table
    assert layout.lay_out_span(text) in (
        laid_out.token_ids[segment.start : segment.end] for segment in laid_out.table.segments
    )
    assert layout.lay_out(Prompt("a"), PAPER).token_ids == (0, 1000 + ord("a"))


def test_a_tokenizer_that_does_not_obey_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="could forge"):
        TextEncoder(SlowTokenizer(obedient=False), [])


# --- refusals -------------------------------------------------------------------------------


def test_an_ordinary_token_as_marker_is_refused_in_text(llama: Any) -> None:
    (hash_id,) = llama.encode("#", add_special_tokens=False)
    layout = Layout(llama, SpanConfig(hash_id, 300, 301, 16))
    layout.lay_out(Prompt([Span("fine"), Text("q")]), PAPER)
    for prompt in (Prompt([Span("a#b"), Text("q")]), Prompt([Span("a"), Text("#")]), Prompt("#")):
        with pytest.raises(PromptError, match=f"encodes to token {hash_id}"):
            layout.lay_out(prompt, PAPER)


NO_UNICODE = {
    "document": (
        Prompt([Span("fine"), Span("né a\ud800b"), Text("q")]),
        r"Document 2 cannot be encoded: it has \\ud800 at index 4",
    ),
    "document with an id": (
        Prompt([Text("x"), Span("\udc00", id="wiki"), Text("q")]),
        r"Document 1 \(id 'wiki'\) .* \\udc00 at index 0",
    ),
    "raw text": (Prompt("<|eot_id|> é \udfff"), r"The prompt's text .* \\udfff at index 13"),
    "question": (
        Prompt.chat([Message("system", "x"), Message("user", [Span("a"), Text("\udfffq?")])]),
        r"Message 2 \('user'\) .* \\udfff at index 0",
    ),
    "second half first": (
        Prompt.chat([Message("user", [Span("a"), Text("q \udc00\ud83d")])]),
        r"Message 1 \('user'\) .* \\udc00 at index 2",
    ),
    "long": (
        Prompt([Span("x" * 10**6 + "\ud800" + "y" * 10**6), Text("q")]),
        r"Document 1 .* \\ud800 at index 1000000,",
    ),
}


@pytest.mark.parametrize(("prompt", "message"), NO_UNICODE.values(), ids=NO_UNICODE)
def test_text_that_is_no_unicode(llama: Any, prompt: Prompt, message: str) -> None:
    """The error names whose it is, the character and its index, and can itself be encoded."""
    layout = layout_of(llama)
    for technique in (PRIMED, PAPER, FULL):
        with pytest.raises(PromptError, match=message) as caught:
            layout.lay_out(prompt, technique)
        assert len(str(caught.value).encode()) < 400
        assert "\ue000" not in str(caught.value)
        assert "\\ue00" not in str(caught.value)


def test_what_is_no_unicode_elsewhere(llama: Any) -> None:
    layout = layout_of(llama)
    with pytest.raises(PromptError, match=r"Document 2 .* \\ud800 at index 1"):
        layout.warm_prompts(iter(["a", "b\ud800"]), max_tokens=100)
    with pytest.raises(PromptError, match=r"Document 1 .* \\ud800 at index 1"):
        layout.lay_out_prefix(Prompt([Text("x"), Span("b\ud800"), Text("q")]), PRIMED)
    primed = resolve_technique("primed", primer=["a\ud800"])
    with pytest.raises(PromptError, match=r"\\ud800 at index \d") as caught:
        layout.lay_out(Prompt([Span("a"), Text("q")]), primed)
    assert "\\ue00" not in str(caught.value)
    layout.lay_out(Prompt([Span("\U0001f600"), Text("a\ufffdé")]), PAPER)


def test_no_token_to_fill_the_prefix_with() -> None:
    class NoSpace(SlowTokenizer):
        def encode(self, text: str, **options: bool) -> list[int]:  # type: ignore[override]
            return super().encode(text.replace("\n", "nl").replace(" ", "sp"), **options)

    with pytest.raises(ConfigurationError, match="line break"):
        TextEncoder(NoSpace(), [])


# --- the cache of documents -----------------------------------------------------------------


def test_documents_are_remembered_within_bounds() -> None:
    class Counting(SlowTokenizer):
        count = 0

        def encode(self, text: str, **options: bool) -> list[int]:  # type: ignore[override]
            Counting.count += 1
            return super().encode(text, **options)

    encoder = TextEncoder(Counting(), [], max_cached_tokens=10)

    def encodes(text: str) -> bool:
        before = Counting.count
        assert len(encoder.encode_document(text)) == len(text)
        return Counting.count > before

    assert [encodes("aaaa"), encodes("bbbb"), encodes("aaaa")] == [True, True, False]
    assert encodes("cccc")  # 12 tokens: the oldest, b, goes
    assert [encodes("aaaa"), encodes("cccc"), encodes("bbbb")] == [False, False, True]
    assert encodes("x" * 11)
    assert encodes("x" * 11)  # too long to keep, and pushed nothing out
    assert not encodes("bbbb")
    encoder.encode_document("bbbb").append(0)  # callers get a copy
    assert not encodes("bbbb")
