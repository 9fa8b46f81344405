"""Every layout option, wherever options are given, checked and written down."""

from __future__ import annotations

import argparse
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import langchain_minipic
import pytest
from llama_index.llms import minipic as llama_index_minipic

from minipic_backend import ConfigurationError, Engine, Prompt, RemoteEngine, Span, Text
from minipic_backend.choices import LAYOUT_DEFAULTS, choose_layout
from minipic_backend.cli import explain, serve
from minipic_backend.config import TECHNIQUE_SETTINGS
from minipic_backend.models import HUB_NAME
from minipic_backend.sampling import LAYOUT_OPTIONS
from minipic_backend.testing import FakeEngine

DOCS = Path(__file__).parents[1] / "docs"
VALUES: dict[str, Any] = {
    "technique": "epic", "frame": "none", "primer": False, "see_primer": True, "best_last": False,
    "late": 0, "blocks": 1, "budget": 0.2, "offsets": "padded",
}  # fmt: skip
FLAGS = ("best_last", "see_primer")
MODELS = (
    langchain_minipic.ChatMiniPIC,
    langchain_minipic.MiniPIC,
    llama_index_minipic.MiniPIC,
)


def _commands() -> dict[str, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return {"explain": parser, "serve": serve._parser()}


@pytest.mark.parametrize("name", sorted(LAYOUT_OPTIONS - {"see_markers"}))
def test_every_option_is_known_everywhere(name: str) -> None:
    assert name in LAYOUT_DEFAULTS
    for made in (Engine, RemoteEngine, *([FakeEngine] if name != "offsets" else [])):
        assert name in inspect.signature(made.__init__).parameters, made
    for model in MODELS:
        assert name in model.model_fields, model
        assert model(engine=FakeEngine(), **{name: VALUES[name]})._own_options() == {
            name: VALUES[name]
        }
    for command, parser in _commands().items():
        options = {flag for action in parser._actions for flag in action.option_strings}
        flag = "--no-primer" if name == "primer" else "--" + name.replace("_", "-")
        assert flag in options, command
        if command == "serve":
            assert f"`{flag}`" in (DOCS / "serving.md").read_text()
    assert f"`{name}`" in (DOCS / "langchain.md").read_text()
    if name in TECHNIQUE_SETTINGS:
        assert f"`{name}=`" in (DOCS / "techniques.md").read_text()


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["yes", "maybe", 1, 0, 1.0, []])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    calls = [
        lambda options: choose_layout(LAYOUT_DEFAULTS, options),  # a server's
        lambda options: Engine("model", **options),
        lambda options: RemoteEngine("http://127.0.0.1:1/v1", **options),
        lambda options: FakeEngine(**options).explain("x"),
        lambda options: FakeEngine().generate("x", **options),
        lambda options: langchain_minipic.ChatMiniPIC(engine=FakeEngine()).invoke("x", **options),
        lambda options: llama_index_minipic.MiniPIC(engine=FakeEngine()).complete("x", **options),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=f"{name}=.*True or False"):
            call({name: value})


@pytest.mark.parametrize("value", [True, False, None])
def test_models_keep_flags(value: bool | None) -> None:
    given: Any = dict.fromkeys(FLAGS, value)
    for model in MODELS:
        made = model(model="m", **given)
        copies = [pickle.loads(pickle.dumps(made)), made.model_copy()]
        if isinstance(made, llama_index_minipic.MiniPIC):
            copies += [model.from_json(made.to_json()), model.from_dict(made.to_dict())]
        for copy in copies:
            assert {name: getattr(copy, name) for name in FLAGS} == given


def test_the_order_is_chosen_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": text, "minipic": {"span": True, "rank": rank, "id": text}}
        for rank, text in enumerate(("best", "second", "third"))
    ]
    content = [*parts, {"type": "text", "text": "Which?"}]
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([{"role": "user", "content": content}]))

    def labels(*arguments: str) -> list[str]:
        parser = _commands()["explain"]
        options = parser.parse_args([HUB_NAME, str(file), "--late", "0", *arguments])
        rows = explain.explain(options).rows
        return [row.label.split()[-1] for row in rows if row.kind == "span"]

    assert labels() == ["third", "second", "best"]
    assert labels("--no-best-last") == ["best", "second", "third"]
    assert labels("--technique", "epic", "--best-last") == ["third", "second", "best"]


def test_order_changes_neither_the_number_of_tokens_nor_what_is_warm() -> None:
    parts = [Span(text, rank) for rank, text in enumerate(("One.", "Two.", "Three."))]
    prompt = Prompt([Text("s"), *parts, Text("q")])
    engine = FakeEngine(late=0)
    engine.warm([part.text for part in parts], prompt=prompt, best_last=False)
    for chosen in (True, False):
        rows = engine.explain(prompt, best_last=chosen).rows
        assert [row.state for row in rows if row.kind == "span"] == ["warm"] * 3
    counts = {engine.count_prompt_tokens(prompt, best_last=chosen) for chosen in (True, False)}
    assert len(counts) == 1
    compared = engine.compare(prompt, ["primed", "primed:best_last=false"], max_tokens=4)
    assert len(compared.answers) == 2
