"""Prompts in tokens: a document is the same span everywhere, no text becomes a special token."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from minipic_backend.config import SpanConfig, SpanOptions, TechniqueSettings, resolve_technique
from minipic_backend.errors import ConfigurationError, ContextWindowError, PromptError
from minipic_backend.layout.markers import choose_markers
from minipic_backend.layout.primer import AUTO_PRIMER
from minipic_backend.layout.prompt_layout import (
    LaidOutPrompt,
    Layout,
    canonical_document,
    explain_rows,
)
from minipic_backend.prompt import Message, Prompt, Span, Text
from minipic_backend.spans.segments import SegmentKind, parse_segments
from minipic_backend.testing import FakeEngine

BLOCK_SIZE = 32
PRIMED = resolve_technique("primed")
PAPER = resolve_technique("block_attention")
FULL = resolve_technique("full")
TECHNIQUES = (PRIMED, PAPER, FULL, resolve_technique("primed", late=0, primer=False))

# Every special token of SmolLM2, and pieces that could join to one.
SPECIAL_TEXTS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<repo_name>",
    "<reponame>",
    "<file_sep>",
    "<filename>",
    "<gh_stars>",
    "<issue_start>",
    "<issue_comment>",
    "<issue_closed>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<jupyter_script>",
    "<empty_output>",
)
ODD_PIECES = (
    *("<|im_", "start|>", "<|", "|>", "<", ">", "<file", "_sep>", "<repo_name", "im_start"),
    *("\r\n", "\n", "\n\n", " ", "\t", "\x00", "\u2028", "\u00a0", "\ufeff", "\ue000", "Q0Z"),
    *(
        "👩‍👩‍👧‍👦",
        "e\u0301",
        "नमस्ते",
        "日本語",
        "Lothair II",
        "{{ x }}",
        "{% if %}",
        "user\n",
        "assistant",
    ),
)
# All of Unicode but what SmolLM2 has no tokens for, and drops (tests/test_tokens.py has all of it).
characters = st.characters(
    codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"
)
plain_pieces = st.one_of(st.text(characters, max_size=12), st.sampled_from(ODD_PIECES))
plain_texts = st.lists(plain_pieces, max_size=8).map("".join)
texts = st.lists(st.one_of(plain_pieces, st.sampled_from(SPECIAL_TEXTS)), max_size=8).map("".join)
quick = settings(  # a busy machine is no failure
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="session")
def tokenizer(smollm2_tokenizer: Any) -> Any:
    return smollm2_tokenizer


@pytest.fixture(scope="session")
def config(tokenizer: Any) -> SpanConfig:
    markers = choose_markers(tokenizer)
    return SpanConfig(markers.ssep, markers.pdep, markers.pad, BLOCK_SIZE)


@pytest.fixture(scope="session")
def layout(tokenizer: Any, config: SpanConfig) -> Layout:
    return Layout(tokenizer, config)


@pytest.fixture(scope="session")
def forgetful(tokenizer: Any, config: SpanConfig) -> Layout:
    """Encodes every document anew."""
    return Layout(tokenizer, config, max_cached_tokens=0)


def rag(system: str, documents: list[str], question: str, ranked: bool = True) -> Prompt:
    spans = [Span(text, rank if ranked else None) for rank, text in enumerate(documents)]
    return Prompt.chat([Message("system", system), Message("user", [*spans, Text(question)])])


def kinds(laid_out: LaidOutPrompt) -> str:
    """ "psd" for prefix, span, dependent."""
    assert laid_out.table
    return "".join(segment.kind.value[0] for segment in laid_out.table.segments)


def segment_ids(laid_out: LaidOutPrompt, kind: SegmentKind) -> list[tuple[int, ...]]:
    assert laid_out.table
    return [
        laid_out.token_ids[segment.start : segment.end]
        for segment in laid_out.table.segments
        if segment.kind is kind
    ]


def spans_of(laid_out: LaidOutPrompt) -> list[tuple[int, ...]]:
    return segment_ids(laid_out, SegmentKind.SPAN)


def text_of(laid_out: LaidOutPrompt, index: int, tokenizer: Any, config: SpanConfig) -> str:
    """Segment `index`, decoded without its marker and pads."""
    assert laid_out.table
    segment = laid_out.table.segments[index]
    ids = laid_out.token_ids[segment.start : segment.end - segment.num_pads]
    return str(tokenizer.decode(ids[segment.kind is not SegmentKind.PREFIX :]))


# --- documents ------------------------------------------------------------------------------


@quick
@given(data=st.data(), documents=st.lists(texts, min_size=1, max_size=6), question=texts)
def test_a_document_has_the_same_tokens_wherever_it_stands(
    layout: Layout, forgetful: Layout, data: st.DataObject, documents: list[str], question: str
) -> None:
    alone = {text: forgetful.lay_out_span(text) for text in documents}
    system = data.draw(texts, "system")
    order = data.draw(st.permutations(documents), "order")
    in_order = resolve_technique("primed", late=0, best_last=False)
    technique = data.draw(st.sampled_from([PAPER, in_order]))
    chat = layout.lay_out(rag(system, order, question), technique)
    assert spans_of(chat) == [alone[text] for text in order]
    between = data.draw(st.lists(texts, min_size=len(order), max_size=len(order)), "between")
    parts = [
        part for text, gap in zip(order, between, strict=True) for part in (Text(gap), Span(text))
    ]
    raw = forgetful.lay_out(Prompt(parts), technique)
    assert spans_of(raw) == [alone[text] for text in order]


@quick
@given(text=texts)
def test_a_span_decodes_to_its_document(
    layout: Layout, tokenizer: Any, config: SpanConfig, text: str
) -> None:
    ids = layout.lay_out_span(text)
    assert len(ids) % BLOCK_SIZE == 0
    assert ids[0] == config.ssep
    content = [i for i in ids[1:] if i != config.pad]
    assert ids == (config.ssep, *content, *[config.pad] * (len(ids) - 1 - len(content)))
    assert tokenizer.decode(content) == canonical_document(text)
    assert not set(content) & set(tokenizer.added_tokens_decoder)


@quick
@given(text=texts)
def test_canonical_form(text: str) -> None:
    canonical = canonical_document(text)
    assert canonical_document(canonical) == canonical
    assert canonical.endswith("\n\n")
    assert canonical[:-2] == canonical.rstrip()
    assert canonical[:-2] in text
    assert canonical[:-2].strip() == text.strip()


def test_canonical_form_by_example() -> None:
    assert canonical_document("") == canonical_document(" \r\n\t") == "\n\n"
    assert canonical_document(" \r\n\n  indented\r\nnext \n ") == "  indented\r\nnext\n\n"


@pytest.mark.parametrize("text", ["", "a", "x" * 200_000, "Lothair II. " * 5_000])
def test_documents_of_any_length(
    layout: Layout, tokenizer: Any, config: SpanConfig, text: str
) -> None:
    laid_out = layout.lay_out(rag("s", [text, "other", text], "q"), PAPER)
    assert kinds(laid_out) == "psssd"
    first, _, third = spans_of(laid_out)
    assert first == third == layout.lay_out_span(text)
    assert text_of(laid_out, 1, tokenizer, config) == canonical_document(text)


def test_the_longest_document_without_pads(layout: Layout, config: SpanConfig) -> None:
    for length in range(1, 80):
        ids = layout.lay_out_span("a " * length)
        num_pads = ids.count(config.pad)
        assert 0 <= num_pads < BLOCK_SIZE
    assert any(config.pad not in layout.lay_out_span("a " * length) for length in range(1, 80))


def test_many_documents(layout: Layout) -> None:
    documents = [f"Document {i} is about {i % 7}." for i in range(300)]
    laid_out = layout.lay_out(rag("s", documents, "q"), PAPER)
    assert spans_of(laid_out) == [layout.lay_out_span(text) for text in documents]


# --- special tokens -------------------------------------------------------------------------


@quick
@given(
    system=texts,
    documents=st.lists(texts, max_size=4),
    question=texts,
    technique=st.sampled_from(TECHNIQUES),
)
def test_special_tokens_are_the_templates_own(
    layout: Layout,
    tokenizer: Any,
    config: SpanConfig,
    system: str,
    documents: list[str],
    question: str,
    technique: TechniqueSettings,
) -> None:
    laid_out = layout.lay_out(rag(system, documents, question), technique)
    specials = [i for i in laid_out.token_ids if i in tokenizer.added_tokens_decoder]
    ours = (config.ssep, config.pdep, config.pad)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [i for i in specials if i not in ours] == [start, end, start, end, start]
    markers = [i for i, token in enumerate(laid_out.token_ids) if token in ours[:2]]
    assert all(i % BLOCK_SIZE == 0 for i in markers)
    if laid_out.table is None:
        assert not set(specials) & set(ours)
        assert laid_out.num_pads == 0
    else:
        segments = laid_out.table.segments
        assert (
            segments
            == parse_segments(
                laid_out.token_ids, config, SpanOptions(frame=technique.frame)
            ).segments
        )  # type: ignore[union-attr]
        bounds = [0, *(segment.end for segment in segments)]
        assert [segment.start for segment in segments] == bounds[:-1]
        assert bounds[-1] == len(laid_out.token_ids)
        assert [0, *markers] == bounds[:-1]
        hidden = sum(segment.num_pads for segment in segments)
        assert specials.count(config.pad) == hidden <= laid_out.num_pads


@quick
@given(system=texts, documents=st.lists(texts, max_size=4), question=texts)
def test_full_is_the_ordinary_prompt_and_nothing_of_ours_leaks(
    layout: Layout, tokenizer: Any, system: str, documents: list[str], question: str
) -> None:
    laid_out = layout.lay_out(rag(system, documents, question), FULL)
    inline = "".join(map(canonical_document, documents))
    expected = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": system},
            {"role": "user", "content": inline + (question.lstrip() if documents else question)},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(laid_out.token_ids) == expected


@quick
@given(system=texts, documents=st.lists(texts, min_size=1, max_size=4), question=texts)
def test_spans_hold_the_same_text_as_the_ordinary_prompt(
    layout: Layout, tokenizer: Any, config: SpanConfig,
    system: str, documents: list[str], question: str,
) -> None:  # fmt: skip
    prompt = rag(system, documents, question)
    full = tokenizer.decode(layout.lay_out(prompt, FULL).token_ids)
    laid_out = layout.lay_out(prompt, PAPER)
    shown = [text_of(laid_out, i, tokenizer, config) for i in range(len(laid_out.segments))]
    num_fill = laid_out.segments[0].num_pads
    assert num_fill < BLOCK_SIZE
    assert shown[0].endswith("\n" * num_fill)
    shown[0] = shown[0][: len(shown[0]) - num_fill]
    assert "".join(shown) == full


@quick
@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool"]), plain_texts), min_size=1
    ),
    generate=st.booleans(),
)
def test_an_ordinary_chat_has_the_template_s_own_tokens(
    layout: Layout, tokenizer: Any, messages: list[tuple[str, str]], generate: bool
) -> None:
    assume(not any(special in text for _, text in messages for special in SPECIAL_TEXTS))
    laid_out = layout.lay_out(
        Prompt.chat(
            [Message(role, text) for role, text in messages], add_generation_prompt=generate
        ),
        PRIMED,
    )
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        add_generation_prompt=generate,
        return_dict=False,
    )
    assert list(laid_out.token_ids) == expected
    assert laid_out.table is None


@quick
@given(parts=st.lists(texts, min_size=1, max_size=4))
def test_raw_text_has_the_tokenizer_s_own_tokens(
    layout: Layout, tokenizer: Any, parts: list[str]
) -> None:
    whole = "".join(parts)
    assume(whole)
    laid_out = layout.lay_out(Prompt(parts), PRIMED)
    assert tokenizer.decode(laid_out.token_ids) == whole
    assert not set(laid_out.token_ids) & set(tokenizer.added_tokens_decoder)
    if not any(special in whole for special in SPECIAL_TEXTS):
        assert list(laid_out.token_ids) == tokenizer.encode(whole)


# --- where things go ------------------------------------------------------------------------


def test_the_usual_prompt(layout: Layout, tokenizer: Any, config: SpanConfig) -> None:
    laid_out = layout.lay_out(rag("Be brief.", ["first", "second", "third"], "\n\nWho?"), PRIMED)
    assert kinds(laid_out) == "pssd"
    text = [text_of(laid_out, i, tokenizer, config) for i in range(4)]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert text[0].rstrip() == head + "\n\n".join(AUTO_PRIMER)
    assert text[1:] == [
        "third\n\n",
        "second\n\n",
        "first\n\nWho?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [segment.label for segment in laid_out.segments] == [
        "prefix (+2 primers)",
        "doc 3",
        "doc 2",
        "question (late: doc 1)",
    ]
    assert laid_out.num_spans == 2
    assert laid_out.prefix_token_ids == laid_out.token_ids[: len(laid_out.prefix_token_ids)]
    assert len(laid_out.prefix_token_ids) == laid_out.table.segments[0].end  # type: ignore[union-attr]
    assert laid_out.num_pads == sum(segment.num_pads for segment in laid_out.segments) > 0


@pytest.mark.parametrize("frame", ["prefix", "universal"])
@pytest.mark.parametrize("system", ["Be brief.", ""])
@pytest.mark.parametrize("chat", [False, True])
def test_the_question_sees_no_primer(
    layout: Layout, tokenizer: Any, frame: str, system: str, chat: bool
) -> None:
    """Spans alone are computed behind it: a model that is asked what it was given would tell."""
    if chat:
        parts = [Text("Read: "), Span("A document."), Text("Who?")]
        prompt = Prompt.chat([Message("system", system), Message("user", parts)])
    else:
        prompt = Prompt([Text(system), Span("A document."), Text("Who?")])
    hidden = layout.lay_out(prompt, resolve_technique("primed", frame=frame))
    seen = layout.lay_out(prompt, resolve_technique("primed", frame=frame, see_primer=True))
    text = tokenizer.decode(layout.lay_out(prompt, FULL).token_ids)
    assert hidden.token_ids == seen.token_ids
    assert hidden.table
    assert seen.table
    assert seen.table.options.seen_prefix is None
    end = hidden.table.options.seen_prefix
    assert end is not None
    prefix = hidden.prefix_token_ids
    assert 0 < end < len(prefix)
    assert not any(passage.split()[0] in tokenizer.decode(prefix[:end]) for passage in AUTO_PRIMER)
    shown = tokenizer.decode(prefix[:end])
    if system and frame == "prefix":
        assert system in shown
    else:
        assert end == 1 or chat
    assert text.startswith(shown) or end == 1
    ranges = [(start, stop) for s, start, stop in hidden.table.seen_before(99) if not s.start]
    assert ranges == [(0, end)]
    span = next(s for s in hidden.table.segments if s.kind is SegmentKind.SPAN)
    assert span.cached_position == hidden.table.num_frame_tokens == len(prefix)


def test_primers(layout: Layout, tokenizer: Any, config: SpanConfig) -> None:
    prompt = rag("s", ["d"], "q", ranked=False)

    def prefix(**overrides: Any) -> tuple[str, str]:
        laid_out = layout.lay_out(prompt, resolve_technique("primed", **overrides))
        return text_of(laid_out, 0, tokenizer, config).rstrip(), laid_out.segments[0].label

    bare, label = prefix(primer=False)
    assert (bare, label) == ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user", "prefix")
    # A primer's passage may not forge anything either.
    own, label = prefix(primer=("  one<|im_end|>\n",))
    assert (own, label) == (bare + "\n  one<|im_end|>", "prefix (+1 primer)")
    assert prefix(primer=["one", "two"])[0] == bare + "\none\n\ntwo"

    nothing = resolve_technique("primed", frame="none")
    laid_out = layout.lay_out(prompt, nothing)
    assert text_of(laid_out, 0, tokenizer, config).rstrip() == bare
    assert "primer is left out" in str(explain_rows(laid_out))


def test_an_empty_prompt_is_refused(layout: Layout) -> None:
    with pytest.raises(PromptError, match="empty"):
        layout.lay_out(Prompt(""), PRIMED)


@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_a_prompt_that_starts_with_a_document(layout: Layout, frame: str) -> None:
    prompt = Prompt([Span("d"), Text("q")])
    bare = layout.lay_out(prompt, resolve_technique("primed", frame=frame, primer=False))
    assert kinds(bare) == "sd"  # SmolLM2 puts no BOS in front
    assert bare.prefix_token_ids == ()
    primed = layout.lay_out(prompt, resolve_technique("primed", frame=frame))
    assert kinds(primed) == ("psd" if frame == "prefix" else "sd")


def test_a_prompt_that_ends_in_a_document(
    layout: Layout, tokenizer: Any, config: SpanConfig
) -> None:
    newline = tokenizer.encode("\n")
    for prompt in (Prompt([Text("a"), Span("b")]), Prompt([Text("a"), Span("b"), Text(" \n")])):
        laid_out = layout.lay_out(prompt, PAPER)
        assert kinds(laid_out) == "psd"
        assert list(laid_out.token_ids[-2:]) == [config.pdep, *newline]
        assert laid_out.segments[-1].label == "end"
    late = layout.lay_out(Prompt([Text("a"), Span("b", rank=0)]), PRIMED)
    assert kinds(late) == "pd"
    assert text_of(late, 1, tokenizer, config) == "b\n\n"


def test_text_and_white_space_between_documents(
    layout: Layout, tokenizer: Any, config: SpanConfig
) -> None:
    parts = [Span("a"), Text(" \n\r\n"), Span("b"), Text("\n Next:\t "), Span("c"), Text("  q ")]
    laid_out = layout.lay_out(Prompt([Text("Context:"), *parts]), PAPER)
    assert kinds(laid_out) == "pssdsd"
    text = [text_of(laid_out, i, tokenizer, config) for i in range(6)]
    assert text[0].rstrip("\n") == "Context:"
    assert text[1:] == ["a\n\n", "b\n\n", "Next:\n\n", "c\n\n", "q "]
    assert [s.label for s in laid_out.segments][3] == "text"
    full = layout.lay_out(Prompt([Text("Context:"), *parts]), FULL)
    assert tokenizer.decode(full.token_ids) == "Context:\n\na\n\nb\n\nNext:\n\nc\n\nq "


def test_documents_of_several_messages(layout: Layout, tokenizer: Any, config: SpanConfig) -> None:
    prompt = Prompt.chat(
        [
            Message("user", [Span("a", 0), Span("b", 1), Text("first?")]),
            Message("assistant", "Answer."),
            Message("user", [Span("c", 1), Span("d", 0), Text("second?")]),
        ]
    )
    laid_out = layout.lay_out(prompt, PRIMED)
    assert kinds(laid_out) == "pssdsd"  # late: of the last run of documents only
    text = [text_of(laid_out, i, tokenizer, config) for i in range(1, 6)]
    assert text[:2] == ["b\n\n", "a\n\n"]  # the best one last, in every run
    assert text[2].startswith("first?<|im_end|>")
    assert text[3] == "c\n\n"
    assert text[4].startswith("d\n\nsecond?<|im_end|>")


@pytest.mark.parametrize("best_last", [True, False])
@pytest.mark.parametrize(
    ("ranks", "late", "spans", "given", "dependent"),
    [
        ([0, 1, 2], 0, "CBA", "ABC", ""),
        ([0, 1, 2], 1, "CB", "BC", "A"),
        ([2, 0, 1], 0, "ACB", "ABC", ""),
        ([2, 0, 1], 1, "AC", "AC", "B"),
        ([2, 0, 1], 2, "A", "A", "CB"),
        ([2, 0, 1], 3, "", "", "ACB"),
        ([2, 0, 1], 9, "", "", "ACB"),
        ([None, 5, None], 0, "ACB", "ABC", ""),
        ([None, 5, None], 2, "AC", "AC", "B"),
        ([3, None, 1], 0, "BAC", "ABC", ""),
        ([None, None, None], 1, "ABC", "ABC", ""),
        ([0, 0, 0], 0, "CBA", "ABC", ""),
        ([0, 0, 0], 1, "CB", "BC", "A"),
    ],
)
def test_the_order_of_documents_and_which_are_late(
    layout: Layout, tokenizer: Any, config: SpanConfig, best_last: bool,
    ranks: list[int | None], late: int, spans: str, given: str, dependent: str,
) -> None:  # fmt: skip
    """As the engine has it, and the fake one."""
    documents = [Span(text, rank) for text, rank in zip("ABC", ranks, strict=True)]
    settings = resolve_technique("primed", late=late, best_last=best_last)
    spans = spans if best_last else given
    laid_out = layout.lay_out(Prompt([Text("s"), *documents, Text("q")]), settings)
    assert kinds(laid_out) == "p" + "s" * len(spans) + "d"
    text = [text_of(laid_out, i, tokenizer, config) for i in range(1, len(spans) + 2)]
    assert text[:-1] == [f"{name}\n\n" for name in spans]
    assert text[-1] == "".join(f"{name}\n\n" for name in dependent) + "q"
    if spans:
        options = {"late": late, "best_last": best_last}
        fake = FakeEngine().explain(Prompt([Text("s"), *documents, Text("q")]), **options)
        assert [row.preview.strip() for row in fake.rows if row.kind == "span"] == list(spans)


some_ranks = st.one_of(st.none(), st.integers(0, 3))
some_parts = st.one_of(
    st.builds(Span, st.sampled_from("ABCDE"), some_ranks),
    st.builds(Span, st.sampled_from("ABCDE"), some_ranks),
    st.builds(Text, st.sampled_from(["", "\n", " ", "\t \n", "x", " y", "z\n"])),
)
some_messages = st.builds(
    Message, st.sampled_from(["user", "assistant"]), st.lists(some_parts, min_size=1, max_size=6)
)
some_prompts = st.one_of(
    st.lists(some_parts, max_size=8).map(lambda parts: Prompt([Text("s"), *parts])),
    st.lists(some_messages, min_size=1, max_size=3).map(
        lambda turns: Prompt.chat([Message("system", "s"), *turns])
    ),
)


@settings(quick, max_examples=200)
@given(
    prompt=some_prompts,
    late=st.integers(0, 3),
    best_last=st.booleans(),
    frame=st.sampled_from(["none", "prefix", "universal"]),
)
def test_the_fake_engine_has_the_same_segments(
    layout: Layout, tokenizer: Any, config: SpanConfig,
    prompt: Prompt, late: int, best_last: bool, frame: str,
) -> None:  # fmt: skip
    """Whatever ranks, in one turn or several, with white space between, with documents twice."""
    options = {"late": late, "best_last": best_last, "frame": frame}
    laid_out = layout.lay_out(prompt, resolve_technique("primed", **options))
    rows = FakeEngine().explain(prompt, **options).rows
    if laid_out.table is None:
        assert len(rows) == 1
        return
    assert "".join(row.kind[0] for row in rows) == kinds(laid_out)
    for index, row in enumerate(rows):
        if row.kind == "span":
            text = text_of(laid_out, index, tokenizer, config)
            assert row.preview.strip() == text.strip()


@pytest.mark.parametrize("technique", ["block_attention", "epic", "selective"])
def test_other_techniques_leave_documents_where_they_are(layout: Layout, technique: str) -> None:
    prompt = rag("s", ["first", "second", "third"], "q")
    labels = [s.label for s in layout.lay_out(prompt, resolve_technique(technique)).segments]
    assert [one for one in labels if one[-1].isdecimal()] == ["doc 1", "doc 2", "doc 3"]
    chosen = resolve_technique(technique, best_last=True)
    labels = [s.label for s in layout.lay_out(prompt, chosen).segments]
    assert [one for one in labels if one[-1].isdecimal()] == ["doc 3", "doc 2", "doc 1"]


def test_equal_documents_are_late_one_by_one(layout: Layout) -> None:
    twin = Span("same", rank=0, id="x")
    laid_out = layout.lay_out(Prompt([Text("s"), twin, twin, Text("q")]), PRIMED)
    assert kinds(laid_out) == "psd"


def test_frames_must_agree(layout: Layout) -> None:
    prompt = rag("s", ["d"], "q")
    with pytest.raises(ConfigurationError, match="frame"):
        layout.lay_out(prompt, PRIMED, options=SpanOptions(frame="none"))
    options = SpanOptions(frame="prefix", offsets="padded", see_markers=False)
    table = layout.lay_out(prompt, PRIMED, options=options).table
    assert table
    assert replace(table.options, seen_prefix=None) == options
    assert layout.lay_out(prompt, FULL, options=options).table is None


# --- warming --------------------------------------------------------------------------------


def test_warm_prompts(layout: Layout, config: SpanConfig) -> None:
    documents = [f"Document {i}: " + "word " * (7 * i) for i in range(20)]
    prompt = rag("Be brief.", ["anything"], "q", ranked=False)
    prefix = layout.lay_out_prefix(prompt, PRIMED)
    assert prefix == layout.lay_out(rag("Be brief.", documents, "other"), PRIMED).prefix_token_ids
    warm = layout.warm_prompts([*documents, documents[3]], prefix_token_ids=prefix, max_tokens=512)
    assert 1 < len(warm) < len(documents)
    spans: list[tuple[int, ...]] = []
    for ids in warm:
        assert len(ids) <= 512
        table = parse_segments(ids, config, SpanOptions())
        assert table
        assert [segment.kind.value[0] for segment in table.segments] == [
            "p", *["s"] * (len(table.segments) - 2), "d",
        ]  # fmt: skip
        spans += [ids[s.start : s.end] for s in table.segments if s.kind is SegmentKind.SPAN]
        assert ids[: len(prefix)] == prefix
    assert spans == [layout.lay_out_span(text) for text in documents]


def test_a_document_longer_than_a_chunk_is_warmed_alone(layout: Layout) -> None:
    documents = ["a", "b", "long " * 20 * BLOCK_SIZE, "c", "d", "e"]
    spans = [layout.lay_out_span(text) for text in documents]
    chunk = 2 * BLOCK_SIZE
    for prefix in ((), layout.lay_out_prefix(None, PRIMED)):
        warm = layout.warm_prompts(
            documents, prefix_token_ids=prefix, max_tokens=100 * BLOCK_SIZE, chunk=chunk
        )
        bodies = [ids[len(prefix) : -2] for ids in warm]
        assert bodies == [spans[0] + spans[1], spans[2], spans[3] + spans[4], spans[5]]
    with pytest.raises(ContextWindowError):
        layout.warm_prompts(documents, max_tokens=10 * BLOCK_SIZE, chunk=chunk)


def test_the_frame_to_warm_behind(layout: Layout) -> None:
    prompt = rag("s", [""], "q")
    assert layout.lay_out_prefix(prompt, PAPER) == layout.lay_out_prefix(prompt, FULL) == ()
    raw = layout.lay_out(Prompt([Span("d"), Text("q")]), PRIMED)
    assert layout.lay_out_prefix(None, PRIMED) == raw.prefix_token_ids != ()
    with pytest.raises(PromptError, match="no documents"):
        layout.lay_out_prefix(Prompt("just text"), PRIMED)


def test_warm_prompts_refuse(layout: Layout) -> None:
    assert layout.warm_prompts([], max_tokens=10) == []
    (exact,) = layout.warm_prompts(["a"], max_tokens=BLOCK_SIZE + 2)
    assert len(exact) == BLOCK_SIZE + 2
    with pytest.raises(ContextWindowError, match=f"holds {BLOCK_SIZE + 2}"):
        layout.warm_prompts(["a"], max_tokens=BLOCK_SIZE + 1)
    with pytest.raises(PromptError, match="int"):
        layout.warm_prompts([3], max_tokens=512)  # type: ignore[list-item]
    with pytest.raises(PromptError, match="single str"):
        layout.warm_prompts("document", max_tokens=512)


# --- what people see ------------------------------------------------------------------------


def test_explain(layout: Layout) -> None:
    spans = [
        Span("Mandated by law,\n  some <|im_end|> text " * 9, rank=1, id="law-7"),
        Span("b", 0),
    ]
    laid_out = layout.lay_out(Prompt.chat([Message("user", [*spans, "Who was it?"])]), PRIMED)
    assert laid_out.table is not None
    explanation = explain_rows(laid_out, [laid_out.table.segments[0].end, 32, 0])
    assert [(row.kind, row.label, row.state) for row in explanation.rows] == [
        ("prefix", "prefix (+2 primers)", "warm"),
        ("span", "doc law-7", "part"),
        ("dependent", "question (late: doc 2)", "cold"),
    ]
    assert sum(row.num_tokens for row in explanation.rows) == len(explanation.token_ids)
    assert explanation.token_ids == laid_out.token_ids
    span = explanation.rows[1]
    assert span.preview.startswith("Mandated by law, some <|im_end|> text")
    assert span.preview.endswith("…")
    assert explanation.rows[2].preview.startswith("Who was it?<|im_end|> <|im_start|>assistant")
    assert explanation.rows[2].offset == span.offset + span.num_tokens - span.num_pads
    assert "law-7" in str(explanation)
    assert {row.state for row in explain_rows(laid_out).rows} == {"?"}

    (row,) = explain_rows(layout.lay_out(rag("s", ["a", "b"], "q"), FULL)).rows
    assert (row.kind, row.label, row.offset) == (
        "prompt",
        "ordinary prompt (inline: doc 1, doc 2)",
        0,
    )


# --- many threads ---------------------------------------------------------------------------


def test_threads_share_a_layout(tokenizer: Any, config: SpanConfig, forgetful: Layout) -> None:
    shared = Layout(tokenizer, config, max_cached_tokens=200)  # evicts all the time
    documents = [f"Document {i} " + "word " * i for i in range(30)]
    prompts = [rag("s", list(pair), "q") for pair in itertools.pairwise(documents)] * 4
    expected = [forgetful.lay_out(prompt, PAPER).token_ids for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda prompt: shared.lay_out(prompt, PAPER).token_ids, prompts)
    assert list(got) == expected


# --- computed anew --------------------------------------------------------------------------


def patched(laid_out: LaidOutPrompt, tokenizer: Any, config: SpanConfig) -> list[tuple[str, str]]:
    """What each patch replaces and holds, as text."""
    assert laid_out.table
    found = []
    for segment in laid_out.table.segments:
        if segment.replaced:
            ids = [laid_out.token_ids[slice(*segment.replaced)]]
            ids.append(laid_out.token_ids[segment.start : segment.end])
            old, new = (
                tokenizer.decode([i for i in one if i not in (config.ssep, config.pad)])
                for one in ids
            )
            found.append((old, new))
    return found


LONG = "The town of Arlen has a bridge. " * 12


@pytest.mark.parametrize("blocks", [1, 2, 99])
def test_epic_repeats_first_blocks_behind_each_run_of_documents(
    layout: Layout, tokenizer: Any, config: SpanConfig, blocks: int
) -> None:
    prompt = Prompt([Text("s"), Span(LONG), Span("Short."), Text("and"), Span(LONG), Text("q")])
    laid_out = layout.lay_out(prompt, resolve_technique("epic", blocks=blocks))
    assert kinds(laid_out) == "pss" + "dd" + "d" + "s" + "d" + "d"
    copies = patched(laid_out, tokenizer, config)
    assert all(old == new for old, new in copies)
    assert copies[1][1] == "Short.\n\n"
    whole = len(layout.lay_out_span(LONG)) // config.block_size
    assert laid_out.table
    sizes = [s.num_tokens // config.block_size for s in laid_out.table.segments if s.replaced]
    assert sizes == [min(blocks, whole), 1, min(blocks, whole)]


def test_right_behind_its_frame_a_document_is_not_computed_twice(layout: Layout) -> None:
    prompt = Prompt([Text("s"), Span("One."), Span("Two."), Text("q")])
    framed = layout.lay_out(prompt, resolve_technique("epic", frame="prefix"))
    alone = layout.lay_out(prompt, resolve_technique("epic"))
    assert (kinds(framed), kinds(alone)) == ("pss" + "d" + "d", "pss" + "dd" + "d")


def test_selective_looks_at_the_question_alone(
    layout: Layout, tokenizer: Any, config: SpanConfig
) -> None:
    """Not at the chat template's own words behind it."""
    documents = [Span("An assistant im_start. " * 9), Span("Mills and such. " * 12)]
    prompt = Prompt.chat([Message("user", [*documents, Text("Where are the mills?")])])
    laid_out = layout.lay_out(prompt, resolve_technique("selective", budget=0.2))
    assert [new.split()[0] for _, new in patched(laid_out, tokenizer, config)] == ["Mills"]


def test_epic_paper_cuts_heads_off(layout: Layout, tokenizer: Any, config: SpanConfig) -> None:
    prompt = Prompt([Text("s"), Span(LONG), Span("Short."), Text("q")])
    laid_out = layout.lay_out(prompt, resolve_technique("epic_paper"))
    assert kinds(laid_out) == "p" + "ds" + "d" + "d"
    head, rest, short = (text_of(laid_out, i, tokenizer, config) for i in (1, 2, 3))
    assert head + rest == LONG.rstrip() + "\n\n"
    assert short == "Short.\n\n"
    assert laid_out.table
    assert laid_out.table.segments[1].num_tokens == config.block_size
    assert laid_out.table.segments[1].num_pads == 0
