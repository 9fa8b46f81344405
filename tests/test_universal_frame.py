"""Frame "universal": spans behind a context that no caller's text is part of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hashing import Asked
from tiny_tokenizers import LLAMA_SPECIALS, LLAMA_TEMPLATE, byte_level

from minipic_backend.choices import LAYOUT_DEFAULTS, choose_layout
from minipic_backend.config import SpanConfig, SpanOptions, resolve_technique
from minipic_backend.errors import ConfigurationError, PromptError
from minipic_backend.layout.markers import choose_markers
from minipic_backend.layout.primer import AUTO_PRIMER
from minipic_backend.layout.prompt_layout import LaidOutPrompt, Layout, canonical_document
from minipic_backend.prompt import Message, Prompt, Span, Text
from minipic_backend.prompt_cache import Module, Schema
from minipic_backend.spans.segments import SegmentKind

UNIVERSAL = resolve_technique("primed", frame="universal")
BARE = resolve_technique("primed", frame="universal", primer=False)
ON_THE_WIRE = SpanOptions("prefix")
PRIMER = "".join(map(canonical_document, AUTO_PRIMER))
QWEN3 = (  # no system prompt of its own
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ date }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
)
TOOLS_FIRST = (
    "{{ bos_token }}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
characters = st.characters(
    codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"
)
pieces = st.one_of(
    st.text(characters, max_size=12),
    st.sampled_from(("<|im_start|>", "<|im_end|>\n", "system\n", "\n\n", " ", *AUTO_PRIMER)),
)
texts = st.lists(pieces, max_size=6).map("".join)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="session")
def config(smollm2_tokenizer: Any) -> SpanConfig:
    markers = choose_markers(smollm2_tokenizer)
    return SpanConfig(markers.ssep, markers.pdep, markers.pad, 16)


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer: Any, config: SpanConfig) -> Layout:
    return Layout(smollm2_tokenizer, config)


def tiny(template: str | None, bos: str | None = LLAMA_SPECIALS[0]) -> tuple[Layout, Any]:
    specials = (*LLAMA_SPECIALS, "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
    tokenizer = byte_level(specials, template, bos)
    return Layout(tokenizer, SpanConfig(258, 259, 260, 16)), tokenizer


def kinds(laid_out: LaidOutPrompt) -> str:
    assert laid_out.table
    return "".join(segment.kind.value[0] for segment in laid_out.table.segments)


def spans(laid_out: LaidOutPrompt) -> list[tuple[int, ...]]:
    assert laid_out.table
    return [
        laid_out.token_ids[segment.start : segment.end]
        for segment in laid_out.table.segments
        if segment.kind is SegmentKind.SPAN
    ]


def span_hashes(laid_out: LaidOutPrompt, config: SpanConfig) -> list[tuple[bytes, ...]]:
    assert laid_out.table
    hashes = Asked(laid_out.token_ids, options=laid_out.table.options, config=config).chain()
    found = hashes.extend([], laid_out.token_ids, lambda start, end, salted: None)
    size = config.block_size
    return [
        tuple(found[segment.start // size : segment.end // size])
        for segment in laid_out.table.segments
        if segment.kind is SegmentKind.SPAN
    ]


def chat(system: str | None, documents: list[str], question: str = "Why?") -> Prompt:
    messages = [] if system is None else [Message("system", system)]
    user = Message("user", [*map(Span, documents), Text(question)])
    return Prompt.chat([*messages, user])


@quick
@given(texts, texts, st.lists(texts, min_size=1, max_size=3), st.booleans())
def test_a_document_is_the_same_blocks_behind_any_system_prompt(
    smollm2: Layout,
    config: SpanConfig,
    one: str,
    other: str,
    documents: list[str],
    primed: bool,
) -> None:
    technique = UNIVERSAL if primed else BARE
    first = smollm2.lay_out(chat(one, documents), technique, options=ON_THE_WIRE)
    second = smollm2.lay_out(chat(other, documents[::-1], "Who?"), technique)
    assert first.prefix_token_ids == second.prefix_token_ids != ()
    assert first.prefix_token_ids == smollm2.lay_out_prefix(None, technique)
    assert spans(first) == spans(second)[::-1] == [smollm2.lay_out_span(d) for d in documents]
    assert span_hashes(first, config) == span_hashes(second, config)[::-1]
    # The system prompt is not part of what a span depends on, but stands in front of it.
    assert first.table
    for segment in first.table.segments:
        if segment.kind is SegmentKind.SPAN:
            assert segment.cached_position == len(first.prefix_token_ids)


def test_the_usual_prompt(smollm2: Layout, smollm2_tokenizer: Any, config: SpanConfig) -> None:
    laid_out = smollm2.lay_out(chat("Be brief.", ["one", "two"]), UNIVERSAL)
    assert kinds(laid_out) == "pdssd"
    assert [segment.label for segment in laid_out.segments] == [
        "frame (+2 primers)", "text", "doc 1", "doc 2", "question",
    ]  # fmt: skip
    assert laid_out.table
    shown = [
        smollm2_tokenizer.decode(
            laid_out.token_ids[s.start + (s.kind is not SegmentKind.PREFIX) : s.end - s.num_pads]
        )
        for s in laid_out.table.segments
    ]
    assert shown[0].rstrip("\n") + "\n\n" == f"<|im_start|>system\n{PRIMER}"
    assert shown[1] == "Be brief.<|im_end|>\n<|im_start|>user\n"
    assert shown[2:4] == ["one\n\n", "two\n\n"]
    frame, text, first = laid_out.table.segments[:3]
    assert text.offset == frame.end
    assert first.offset == frame.end + text.num_tokens - text.num_pads
    assert laid_out.table.num_frame_tokens == frame.end


def test_late_documents_and_patches_go_on_as_ever(smollm2: Layout) -> None:
    ranked = Prompt.chat(
        [
            Message("system", "Be brief."),
            Message("user", [Span("one", 1), Span("two", 0), Text("Why?")]),
        ]
    )
    assert kinds(smollm2.lay_out(ranked, UNIVERSAL)) == "pdsd"
    epic = resolve_technique("epic", frame="universal")
    laid_out = smollm2.lay_out(ranked, epic)
    # The first document has not seen the system prompt: its head is computed again too.
    assert [segment.label for segment in laid_out.segments][-3:] == [
        "doc 1 again", "doc 2 again", "question",
    ]  # fmt: skip
    right_behind = Prompt([Span("one"), Span("two"), Text("Why?")])
    primed = resolve_technique("epic", frame="universal", primer="auto")
    labels = [segment.label for segment in smollm2.lay_out(right_behind, primed).segments]
    # Nor has the question seen the primer, behind which the first document was computed.
    assert labels[1:] == ["doc 1", "doc 2", "doc 1 again", "doc 2 again", "question"]
    seen = resolve_technique("epic", frame="universal", primer="auto", see_primer=True)
    labels = [segment.label for segment in smollm2.lay_out(right_behind, seen).segments]
    assert labels[1:] == ["doc 1", "doc 2", "doc 2 again", "question"]
    selective = resolve_technique("selective", frame="universal", budget=1.0)
    assert smollm2.lay_out(ranked, selective).num_recomputed_tokens
    split = smollm2.lay_out(ranked, resolve_technique("epic_paper", frame="universal"))
    assert kinds(split) == "pdddd"


def test_modules_of_a_schema_stand_behind_it(smollm2: Layout, config: SpanConfig) -> None:
    technique = resolve_technique("prompt_cache", frame="universal", primer="auto")
    hashes = []
    for system in ("Be brief.", "Answer at length, and in rhyme, please."):
        schema = Schema("s", [Module("a", "alpha"), Module("b", "beta")], system=system)
        laid_out = smollm2.lay_out(schema.prompt("Why?", ["a", "b"]), technique)
        assert kinds(laid_out) == "pdssd"
        hashes.append(span_hashes(laid_out, config))
    assert hashes[0] == hashes[1]


def test_raw_prompts(smollm2: Layout) -> None:
    """The BOS and the primer, then the caller's text."""
    layout, tokenizer = tiny(None)
    raw = Prompt([Text("Read this: "), Span("doc"), Text("Why?")])
    laid_out = layout.lay_out(raw, UNIVERSAL)
    assert kinds(laid_out) == "pdsd"
    prefix = tokenizer.decode(laid_out.prefix_token_ids).rstrip("\n")
    assert prefix == LLAMA_SPECIALS[0] + PRIMER.rstrip("\n")
    assert laid_out.prefix_token_ids == layout.lay_out_prefix(None, UNIVERSAL)
    bare = layout.lay_out(raw, BARE)
    assert tokenizer.decode(bare.prefix_token_ids).rstrip("\n") == LLAMA_SPECIALS[0]
    assert kinds(layout.lay_out(Prompt([Span("doc"), Text("Why?")]), UNIVERSAL)) == "psd"
    # Neither BOS nor primer: nothing that could be a frame.
    assert smollm2.encoder.bos == ()
    for prompt in (raw, Prompt([Span("doc")])):
        with pytest.raises(PromptError, match="universal"):
            smollm2.lay_out(prompt, BARE)


@pytest.mark.parametrize(
    ("template", "opening", "options"),
    [
        (QWEN3, "<|im_start|>system\n", {}),
        (LLAMA_TEMPLATE, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", {}),
        (
            DATED,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n",
            {"template_kwargs": {"date": "26 July 2024"}},
        ),
        (TOOLS_FIRST, "<|begin_of_text|>[INST] ", {}),
        (TOOLS_FIRST, "<|begin_of_text|>", {"tools": [{"name": "find"}]}),
    ],
)
def test_openings_of_templates(template: str, opening: str, options: dict[str, Any]) -> None:
    """Where the caller's text begins, in front of what changes from chat to chat."""
    layout, tokenizer = tiny(template)
    found = set()
    for system in ("Be brief.", "  \nOne, two,\nthree. ", ""):
        messages = chat(system, ["doc"]).messages
        laid_out = layout.lay_out(Prompt.chat(messages, **options), BARE)
        found.add(laid_out.prefix_token_ids)
        full = layout.lay_out(Prompt.chat(messages, **options), resolve_technique("full"))
        assert tokenizer.decode(full.token_ids).startswith(opening)
    (prefix,) = found
    assert tokenizer.decode(prefix).rstrip() == opening.rstrip()


def test_first_messages_of_other_roles() -> None:
    layout, tokenizer = tiny(QWEN3)
    without = layout.lay_out(chat(None, ["doc"]), BARE)
    assert kinds(without) == "psd"  # right behind the opening
    assert tokenizer.decode(without.prefix_token_ids).rstrip("\n") == "<|im_start|>user"
    # A template with a system prompt of its own, as SmolLM2's, opens all chats alike.
    layout, tokenizer = tiny(DATED)
    assert len({layout.lay_out(chat(s, ["d"]), BARE).prefix_token_ids for s in ("S", None)}) == 1
    layout, tokenizer = tiny(NO_SYSTEM)
    user = layout.lay_out(chat(None, ["doc"]), UNIVERSAL).prefix_token_ids
    assert user == layout.lay_out_prefix(None, UNIVERSAL)
    assert tokenizer.decode(user).startswith("<|begin_of_text|><start_of_turn>user\nKasimir")


def test_chats_of_another_template_of_their_own(smollm2: Layout) -> None:
    messages = chat("Be brief.", ["doc"]).messages
    other = {"chat_template": "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{% endfor %}"}
    laid_out = smollm2.lay_out(Prompt.chat(messages, template_kwargs=other), BARE)
    assert kinds(laid_out) == "pdsd"
    assert smollm2.encoder.decode(laid_out.prefix_token_ids).rstrip("\n") == "system:"


def test_prompts_to_warm_behind(smollm2: Layout) -> None:
    frame = smollm2.lay_out_prefix(None, UNIVERSAL)
    for system in ("Be brief.", "Be long."):
        assert smollm2.lay_out_prefix(chat(system, [""]), UNIVERSAL) == frame
    assert frame != smollm2.lay_out_prefix(None, BARE)


def test_the_engine_knows_it_as_a_prefix() -> None:
    technique, options = choose_layout(LAYOUT_DEFAULTS, {"frame": "universal"})
    assert (technique.frame, options.frame) == ("universal", "prefix")
    with pytest.raises(ConfigurationError, match="universal"):
        SpanOptions("universal")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="universal"):
        choose_layout(LAYOUT_DEFAULTS, {"frame": "other"})
