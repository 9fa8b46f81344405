"""`minipic adapt`: the student is the technique, training lowers the divergence, and it says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference
from tiny_models import save_tiny

from minipic_backend.adapt.curve import Curve, Point
from minipic_backend.adapt.examples import Example, join, make_example
from minipic_backend.adapt.span_attention import (
    IMPLEMENTATION,
    full_attention_of,
    inverse_frequencies,
    spans_of,
)
from minipic_backend.adapt.tasks import Task, TaskMaker, split_documents
from minipic_backend.adapt.training import divergence
from minipic_backend.cli import main
from minipic_backend.config import SpanConfig, SpanOptions, resolve_technique
from minipic_backend.layout.markers import choose_markers
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.models import ensure_smollm2
from minipic_backend.prompt import Prompt, Span, Text
from minipic_backend.quality.invented import invented_passages
from minipic_backend.spans.segments import parse_segments

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny(folder, str(ensure_smollm2(progress=False)), "llama", **SHAPE)


@pytest.fixture(scope="module")
def gentle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose attention matters less, so that there is something to learn."""
    folder, source = tmp_path_factory.mktemp("gentle"), str(ensure_smollm2(progress=False))
    return save_tiny(folder, source, "llama", **SHAPE, initializer_range=0.1)


@pytest.fixture(scope="module")
def tokenizer(tiny: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


# ---- the student ----------------------------------------------------------------------------

TECHNIQUES: dict[str, dict[str, Any]] = {
    "block_attention": {},
    "primed": {"late": 0},
    "epic": {"blocks": 1},
    "epic_paper": {},
    "selective": {"budget": 0.4},
}


@pytest.mark.parametrize("offsets", ["compact", "padded"])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_student_is_the_technique(
    tiny: str, tokenizer: Any, technique: str, offsets: Any
) -> None:
    """One forward pass with a mask gives what the reference computes segment by segment."""
    from transformers import AutoModelForCausalLM

    config = SpanConfig(*_markers(tokenizer), block_size=8)
    layout = Layout(tokenizer, config)
    settings = resolve_technique(technique, **TECHNIQUES[technique])
    options = SpanOptions(settings.frame, offsets)
    documents = [
        Span(f"The town of {name} has a {what} by the river, since long ago.")
        for name, what in (("Arlen", "bridge"), ("Berrow", "mill"), ("Calder", "castle"))
    ]
    task = Task(
        Prompt([Text("Read this, please."), *documents[:2], Text("And:"), documents[2],
                Text("Which town has a mill?")]),
        " Berrow has one",
    )  # fmt: skip
    example = make_example(task, layout, config, settings, options, 2, 4096)
    assert example is not None
    model = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float64, attn_implementation=IMPLEMENTATION
    ).eval()
    with torch.no_grad(), spans_of(example, inverse_frequencies(model)):
        got = model(example.student_ids[None], position_ids=example.positions[None]).logits[0]

    laid_out = layout.lay_out(task.prompt, settings, options=options)
    tokens = [*laid_out.token_ids, *layout.encoder.encode(task.answer), 2]
    assert laid_out.table is not None
    table = parse_segments(tokens, config, laid_out.table.options)
    want = Reference.load(tiny).logits(tokens, table)
    count = len(example.weights)
    assert tokens[-count:] == example.teacher_ids[example.teacher_rows + 1].tolist()
    assert tokens[-count:] == example.student_ids[example.student_rows + 1].tolist()
    num_answer = len(tokens) - len(laid_out.token_ids)
    assert example.is_answer.tolist() == [False] * (count - num_answer) + [True] * num_answer
    assert float(example.weights[example.is_answer].sum()) == pytest.approx(1)
    torch.testing.assert_close(got[example.student_rows], want[-count - 1 : -1], rtol=0, atol=1e-5)

    # And the teacher is full attention over the text alone.
    plain = layout.lay_out(task.prompt, resolve_technique("full"))
    if technique != "epic_paper":
        text = tokenizer.decode(example.teacher_ids[:-num_answer])
        assert text.split() == tokenizer.decode(plain.token_ids).split()
        assert text.startswith("Read this, please.\n")


@pytest.mark.parametrize("technique", ["block_attention", "primed", "epic"])
def test_prompts_run_together_do_not_see_each_other(
    tiny: str, tokenizer: Any, technique: str
) -> None:
    from transformers import AutoModelForCausalLM

    config = SpanConfig(*_markers(tokenizer), block_size=8)
    settings = resolve_technique(technique, **TECHNIQUES[technique])
    layout, options = Layout(tokenizer, config), SpanOptions(settings.frame)
    maker = TaskMaker(invented_passages(), kinds=["year"], max_documents=3, seed=5)
    made = [
        make_example(maker.next(), layout, config, settings, options, 2, 4096) for _ in range(5)
    ]
    alone = [example for example in made if example]
    assert len(alone) == 5
    sizes = [len(example.student_ids) for example in alone]
    groups = join(alone, sum(sizes[:3]))
    assert sum(len(group.is_answer) for group in groups) == sum(len(e.is_answer) for e in alone)
    assert 1 < len(groups) < 5
    assert all(len(group.student_ids) <= sum(sizes[:3]) for group in groups)
    assert join(alone, 0) == alone

    model = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float64, attn_implementation=IMPLEMENTATION
    ).eval()
    inv_freq = inverse_frequencies(model)

    def run(examples: list[Example]) -> list[torch.Tensor]:
        found = []
        for e in examples:
            with full_attention_of(e):
                teacher = model(e.teacher_ids[None], position_ids=e.teacher_positions[None])
            with spans_of(e, inv_freq):
                student = model(e.student_ids[None], position_ids=e.positions[None])
            found.append(torch.cat([teacher.logits[0][e.teacher_rows],
                                    student.logits[0][e.student_rows]], 1))  # fmt: skip
        return found

    with torch.no_grad():
        together, apart = torch.cat(run(groups)), torch.cat(run(alone))
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-9)


def _markers(tokenizer: Any) -> tuple[int, int, int]:
    markers = choose_markers(tokenizer)
    return markers.ssep, markers.pdep, markers.pad


def test_divergence_by_hand() -> None:
    teacher, student = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]).log()
    assert divergence(teacher, student).isinf().all()
    student = torch.tensor([[0.75, 0.25]]).log()
    want = 0.5 * torch.tensor(0.5 / 0.75).log() + 0.5 * torch.tensor(0.5 / 0.25).log()
    torch.testing.assert_close(divergence(teacher, student), want[None])


# ---- tasks ----------------------------------------------------------------------------------


def test_tasks_answer_from_their_own_documents() -> None:
    maker = TaskMaker(invented_passages(), kinds=["year", "name"], max_documents=4, seed=3)
    tasks = [maker.next() for _ in range(60)]
    quotes = [t for t in tasks if "Quote" in t.prompt.messages[1].parts[-1].text]
    assert 10 < len(quotes) < 50
    for task in tasks:
        texts = [span.text for span in task.prompt.spans]
        assert 1 < len(texts) <= 4
        assert len(set(texts)) == len(texts)
        assert any(task.answer in " ".join(text.split()) for text in texts)


def test_documents_are_held_out_once_and_for_all() -> None:
    passages = invented_passages()
    train, held_out = split_documents(passages, 0.1, seed=1)
    assert {p.title for p in train} | {p.title for p in held_out} == {p.title for p in passages}
    assert not {p.title for p in train} & {p.title for p in held_out}
    assert split_documents(passages, 0.1, seed=1) == (train, held_out)


# ---- when to stop ---------------------------------------------------------------------------


def curve(*values: float) -> Curve:
    made = Curve(patience=3, trial=2)
    for step, value in enumerate(values):
        made.add(Point(step, value, 0.5, float(step)))
    return made


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((1.0, 0.99), None),
        ((1.0, 0.99, 1.1), "no help"),
        ((1.0, 0.5, 0.6, 0.55), None),
        ((1.0, 0.5, 0.6, 0.55, 0.499), "no gain"),
        ((1.0, 0.5, 0.6, 0.55, 0.4), None),
        ((1.0, float("nan")), "no finite number"),
        ((float("nan"),), "no finite number"),
    ],
)
def test_reasons_to_stop(values: tuple[float, ...], reason: str | None) -> None:
    stop = curve(*values).reason_to_stop()
    assert (stop is None) if reason is None else (stop is not None and reason in stop)


def test_the_best_point_counts() -> None:
    made = curve(1.0, 0.4, 0.7)
    assert (made.best.step, made.helps) == (1, True)
    assert not curve(1.0, 0.97).helps
    for values in ((1.0, float("nan"), 0.5), (float("nan"), 0.5), (0.5, float("nan"))):
        assert curve(*values).best.kl == 0.5


def test_a_curve_is_json_whatever_it_says() -> None:
    text = json.dumps(curve(1.0, float("nan")).to_dict(), allow_nan=False)
    assert json.loads(text)["points"][1]["kl"] is None


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs") / "docs.jsonl"
    rows = [{"title": p.title, "text": p.text} for p in invented_passages()[:40]]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def adapt(model: str, documents: Path, out: Path, *more: str) -> int:
    small = ["--batch-size", "2", "--validation", "4", "--documents", "3", "--rank", "8"]
    return main(["adapt", model, "--docs", str(documents), "--out", str(out), *small, *more])


def test_adapter_helps_and_is_saved(
    gentle: str, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rate = ["--learning-rate", "3e-3", "--steps", "30", "--validate-every", "10"]
    assert adapt(gentle, documents, tmp_path, *rate, "--merge") == 0
    told = json.loads((tmp_path / "adapt.json").read_text())
    assert [point["step"] for point in told["points"]] == [0, 10, 20, 30]
    assert told["helps"]
    assert told["best"]["kl"] < 0.8 * told["points"][0]["kl"]
    assert (tmp_path / "checkpoints" / f"step-{told['best']['step']}").is_dir()
    shown = capsys.readouterr()
    assert "--lora-modules adapted=" in shown.out
    assert "held-out divergence" in shown.err

    # What was saved loads on the model as it came, and is what was merged.
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(gentle, dtype=torch.float32)
        before = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - before).abs().max() > 1e-2


class _Breaking(torch.autograd.Function):
    """What a kernel can do: finite forward, and gradients that are not numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("nan")


def break_gradients(monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[int], bool]) -> list[int]:
    """Gradients of each student's prompt whose number, from 1, `is_broken`, are nan from now on.

    Returns:
        How many there were so far, in one element.
    """
    from minipic_backend.adapt import training

    count = [0]

    def diverge(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        count[0] += student.requires_grad
        if student.requires_grad and is_broken(count[0]):
            student = _Breaking.apply(student)  # type: ignore[no-untyped-call]
        return divergence(teacher, student)

    monkeypatch.setattr(training, "divergence", diverge)
    return count


def test_a_run_that_begins_or_ends_badly_keeps_what_it_has(
    gentle: str, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five bad steps that ended on a step of validation lost the adapter of those before; and a
    model whose divergence is no number was trained for nothing."""
    from minipic_backend.adapt import training

    break_gradients(monkeypatch, lambda number: number > 2 * 15)
    rate = ["--learning-rate", "3e-3", "--steps", "40", "--validate-every", "20"]
    assert adapt(gentle, documents, tmp_path / "late", *rate) == 0
    told = json.loads((tmp_path / "late" / "adapt.json").read_text())
    assert [point["step"] for point in told["points"]] == [0, 20]
    assert "no finite gradients" in told["stopped"]

    def not_a_number(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        return divergence(teacher, student) * float("nan")

    monkeypatch.setattr(training, "divergence", not_a_number)
    assert adapt(gentle, documents, tmp_path / "never", *rate) == 1
    told = json.loads((tmp_path / "never" / "adapt.json").read_text())
    assert [point["step"] for point in told["points"]] == [0]
    assert "no finite number" in told["stopped"]


@pytest.mark.parametrize("broken", ["some", "all"])
def test_steps_without_finite_gradients_change_nothing(
    gentle: str, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """One such prompt made every weight nan, and training went on."""
    count = break_gradients(monkeypatch, lambda number: broken == "all" or number % 7 == 0)
    rate = ["--learning-rate", "3e-3", "--steps", "30", "--validate-every", "10"]
    assert adapt(gentle, documents, tmp_path, *rate) == (0 if broken == "some" else 1)
    told = json.loads((tmp_path / "adapt.json").read_text())
    if broken == "some":
        assert count[0] > 14
        assert told["best"]["kl"] < 0.8 * told["points"][0]["kl"]
    else:
        assert "no finite gradients" in told["stopped"]
        assert {point["kl"] for point in told["points"]} == {told["points"][0]["kl"]}


def test_no_help_is_said_and_nothing_saved(
    tiny: str, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate so low that nothing is learned."""
    rate = ["--learning-rate", "1e-9", "--steps", "40", "--validate-every", "1"]
    assert adapt(tiny, documents, tmp_path, *rate, "--kinds", "none") == 1
    assert "does not help" in capsys.readouterr().out
    assert not (tmp_path / "adapter_model.safetensors").exists()
    assert "no help" in json.loads((tmp_path / "adapt.json").read_text())["stopped"]


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("one\n\ntwo", [], "2 documents"),
        ("\n\n".join(f"Word {i}." for i in range(20)), [], "no document has a sentence"),
        ("\n\n".join(f"Word {i}." for i in range(20)), ["--kinds", "colour"], "No kind"),
    ],
)
def test_what_is_refused(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    text: str, more: list[str], message: str,
) -> None:  # fmt: skip
    path = tmp_path / "docs.txt"
    path.write_text(text)
    assert adapt(tiny, path, tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err
