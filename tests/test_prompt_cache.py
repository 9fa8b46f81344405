"""Schemas, the prompts made of them, PML, and how they are laid out."""

from __future__ import annotations

from typing import Any

import pytest

from minipic_backend import MiniPICError, PromptError
from minipic_backend.config import SpanConfig, SpanOptions, resolve_technique
from minipic_backend.layout.markers import choose_markers
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.prompt import Prompt, Span, Text
from minipic_backend.prompt_cache import (
    Module,
    Parameter,
    Schema,
    Union,
    read_pml_prompt,
    read_pml_schema,
)
from minipic_backend.testing import FakeEngine

PROMPT_CACHE = resolve_technique("prompt_cache")
MIAMI, PARIS = "Miami has beaches and sun.", "Paris has museums, wide streets, and a river."
SCHEMA = Schema(
    "trip",
    [
        "Read this first. ",
        Module(
            "plan",
            [
                "A trip of ",
                Parameter("days", 4),
                " days, for ",
                Parameter("who", 3, default="two"),
                ". ",
                Union([Module("miami", MIAMI), Module("paris", PARIS)]),
                " Bring a coat.",
            ],
        ),
        Module("end", "Be quick."),
    ],
    system="You plan trips.",
    scaffolds=[["plan/paris", "end"]],
)
PML = f"""
<schema name="trip">
  <system>You plan trips.</system> Read this first.
  <!-- a comment -->
  <module name="plan">A trip of <parameter name="days" length="4"/> days.
    <union><module name="miami">{MIAMI}</module><module name="paris">{PARIS}</module></union>
  </module>
  <user><module name="end">Be quick.</module></user>
  <scaffold modules="plan/miami, end"/>
</schema>"""


@pytest.fixture(scope="module")
def layout(smollm2_tokenizer: Any) -> Layout:
    markers = choose_markers(smollm2_tokenizer)
    return Layout(
        smollm2_tokenizer, SpanConfig(markers.ssep, markers.pdep, markers.pad, block_size=8)
    )


def spans(laid_out: Any) -> dict[str, tuple[int, int]]:
    """What each segment is, and where it stands and ends, counted from behind the prefix."""
    base = laid_out.table.segments[0].end
    return {
        shown.label: (s.offset - base, s.offset - base + s.num_tokens - s.num_pads)
        for shown, s in zip(laid_out.segments[1:], laid_out.table.segments[1:], strict=True)
    }


# ---- positions ------------------------------------------------------------------------------


def test_modules_keep_their_positions_whatever_else_is_imported(layout: Layout) -> None:
    chosen = [["plan"], ["plan/miami"], ["plan/paris"], ["plan/miami", "end"], ["end"]]
    found = [
        spans(layout.lay_out(SCHEMA.prompt("Go?", _with_days(paths)), PROMPT_CACHE))
        for paths in chosen
    ]
    everywhere: dict[str, set[tuple[int, int]]] = {}
    for one in found:
        for label, where in one.items():
            everywhere.setdefault(label, set()).add(where)
    for label, places in everywhere.items():
        assert len(places) == 1 or label in ("question", "module plan"), label
    # Both of the union start at one position, behind which the longer one's length is reserved.
    (miami,), (paris,) = everywhere["module plan/miami"], everywhere["module plan/paris"]
    (end,) = everywhere["module end"]
    assert miami[0] == paris[0]
    assert miami[1] < paris[1]
    coat = max(everywhere["module plan"])  # the text behind the union
    assert coat[0] == paris[1]
    assert end[0] == coat[1]


def _with_days(paths: list[str]) -> dict[str, dict[str, str]]:
    given: dict[str, dict[str, str]] = {path: {} for path in paths}
    if any(path.startswith("plan") for path in paths):
        given["plan"] = {"days": "3"}
    return given


def test_the_question_stands_behind_the_last_module(layout: Layout) -> None:
    found = spans(layout.lay_out(SCHEMA.prompt("Go?", ["end"]), PROMPT_CACHE))
    assert found["question"][0] == found["module end"][1]


def test_an_argument_takes_the_place_of_its_parameter(layout: Layout, tokenizer: Any) -> None:
    prompt = SCHEMA.prompt("Go?", {"plan": {"days": "3"}})
    laid_out = layout.lay_out(prompt, PROMPT_CACHE)
    assert laid_out.table is not None
    (patch,) = (s for s in laid_out.table.segments if s.replaced)
    assert patch.replaced is not None
    start, end = patch.replaced
    before = tokenizer.decode(laid_out.token_ids[:start])
    assert before.endswith("A trip of ")
    assert end - start == 4
    text = tokenizer.decode(laid_out.token_ids[patch.start : patch.end - patch.num_pads])
    assert text == "3"
    assert laid_out.num_recomputed_tokens == 1


@pytest.fixture
def tokenizer(smollm2_tokenizer: Any) -> Any:
    return smollm2_tokenizer


def test_a_scaffold_is_one_span_at_the_same_positions(layout: Layout) -> None:
    flat = [Module("a", MIAMI), Module("b", PARIS), Module("c", "The end.")]
    apart = Schema("flat", flat, system="s")
    joined = Schema("flat", flat, system="s", scaffolds=[["a", "b"]])
    one = spans(layout.lay_out(apart.prompt("Go?", ["a", "b", "c"]), PROMPT_CACHE))
    two = spans(layout.lay_out(joined.prompt("Go?", ["a", "b", "c"]), PROMPT_CACHE))
    assert two["module a"] == (one["module a"][0], one["module b"][1])
    assert "module b" not in two
    assert two["module c"] == one["module c"]
    # Half a scaffold is none.
    assert spans(layout.lay_out(joined.prompt("Go?", ["b"]), PROMPT_CACHE)).keys() == {
        "module b",
        "question",
    }


def test_without_anything_in_front_the_first_module_stands_at_0(layout: Layout) -> None:
    schema = Schema("raw", [Module("a", MIAMI), Module("b", PARIS)])
    laid_out = layout.lay_out(schema.prompt("Go?", ["b"], chat=False), PROMPT_CACHE)
    assert laid_out.table is not None
    assert laid_out.table.segments[0].offset == 0


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_prompt_that_imports_nothing(layout: Layout, system: str, chat: bool) -> None:
    """Its question stands right behind the system message, or at the very beginning."""
    schema = Schema("trip", [Module("a", "alpha")], system=system)
    laid_out = layout.lay_out(schema.prompt("Go?", chat=chat), PROMPT_CACHE)
    assert laid_out.table
    *front, question = laid_out.table.segments
    assert question.offset == question.start == sum(segment.num_tokens for segment in front)
    assert bool(front) == bool(system or chat or layout.encoder.bos)


def test_positions_are_the_schemas_whatever_offsets_say(layout: Layout) -> None:
    prompt = SCHEMA.prompt("Go?", {"plan": {"days": "3"}, "plan/paris": {}})
    compact, padded = (
        layout.lay_out(prompt, PROMPT_CACHE, options=SpanOptions("none", offsets))
        for offsets in ("compact", "padded")
    )
    assert compact == padded


def test_other_techniques_see_an_ordinary_prompt(layout: Layout) -> None:
    prompt = SCHEMA.prompt("Go?", {"plan": {"days": "3"}, "plan/paris": {}})
    assert [span.text for span in prompt.spans] == [
        "Read this first. ",
        "A trip of 3 days, for two. ",
        PARIS,
        " Bring a coat.",
    ]
    for technique in ("full", "primed", "epic"):
        layout.lay_out(prompt, resolve_technique(technique))
    assert FakeEngine().generate(prompt).text


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["nowhere"], "no module 'nowhere'; known: plan, plan/miami"),
        (["plan"], "needs an argument 'days'"),
        ({"plan": {"days": "1", "weeks": "2"}}, "no parameter 'weeks'"),
        ({"plan": {"days": "1"}, "plan/miami": {}, "plan/paris": {}}, "miami and paris exclude"),
    ],
)
def test_prompts_that_are_refused(modules: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        SCHEMA.prompt("Go?", modules)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schema("s", [Parameter("p", 1)]),
        lambda: Schema("s", [Module("a", "x"), Module("a", "y")]),
        lambda: Schema("s", [Module("a", "x"), Union([Module("a", "y")])]),
        lambda: Schema("s", ["x"], scaffolds=[["a"]]),
        lambda: Module("a/b", "x"),
        lambda: Module("a", [Parameter("p", 1), Parameter("p", 2)]),
        lambda: Parameter("p", 0),
        lambda: Union([]),
        lambda: Schema("s", [5]),  # type: ignore[list-item]
    ],
)
def test_schemas_that_are_refused(make: Any) -> None:
    with pytest.raises(PromptError):
        make()


def test_arguments_must_fit(layout: Layout) -> None:
    for days in ("a very long time, if you ask me", ""):
        with pytest.raises(PromptError, match="reserved"):
            layout.lay_out(SCHEMA.prompt("Go?", {"plan": {"days": days}}), PROMPT_CACHE)
    long = Schema("s", [Module("a", [Parameter("p", 1, default="much too long a text")])])
    with pytest.raises(PromptError, match="default"):
        layout.lay_out(long.prompt("Go?", ["a"]), PROMPT_CACHE)


def test_scaffolds_must_be_neighbours(layout: Layout) -> None:
    with pytest.raises(PromptError, match="neighbours"):
        layout.lay_out(
            SCHEMA.prompt("Go?", {"plan": {"days": "3"}, "plan/paris": {}, "end": {}}), PROMPT_CACHE
        )


def test_prompt_cache_wants_a_schema(layout: Layout) -> None:
    with pytest.raises(PromptError, match="schema"):
        layout.lay_out(Prompt([Span("a"), Text("q")]), PROMPT_CACHE)


# ---- PML ------------------------------------------------------------------------------------


def test_pml_schema_and_prompt() -> None:
    schema = read_pml_schema(PML)
    assert (schema.name, schema.system) == ("trip", "You plan trips.")
    assert [path for path, _ in schema.modules()] == ["plan", "plan/miami", "plan/paris", "end"]
    assert schema.scaffolds == (("plan/miami", "end"),)
    text = (
        '<prompt schema="trip"><plan days="3"><miami/></plan><user>Where to surf?</user></prompt>'
    )
    prompt = read_pml_prompt(text, {"trip": schema})
    assert prompt.text == "Where to surf?"
    assert prompt.arguments == {"plan": {"days": "3"}, "plan/miami": {}}
    assert [span.text for span in prompt.spans] == [
        " Read this first. ",
        "A trip of 3 days. ",
        MIAMI,
    ]
    assert read_pml_prompt('<prompt schema="trip">Hello</prompt>', schema).text == "Hello"


@pytest.mark.parametrize(
    "text",
    [
        "<schema name='s'><module>x</module></schema>",
        "<schema name='s'><module name='a'><parameter name='p'/></module></schema>",
        "<schema name='s'><union>text<b/></union></schema>",
        "<schema name='s'><table/></schema>",
        "<schema>",
        "<prompt/>",
        '<!DOCTYPE x [<!ENTITY a "b">]><schema name="s">&a;</schema>',
    ],
)
def test_pml_that_is_refused(text: str) -> None:
    with pytest.raises(MiniPICError, match=r"PML|length"):
        read_pml_schema(text)


@pytest.mark.parametrize(
    "text",
    ["<prompt schema='other'>x</prompt>", "<prompt><plan days='1'>text</plan></prompt>",
     "<prompt><nowhere/></prompt>"],
)  # fmt: skip
def test_pml_prompts_that_are_refused(text: str) -> None:
    with pytest.raises(PromptError):
        read_pml_prompt(text, read_pml_schema(PML))
