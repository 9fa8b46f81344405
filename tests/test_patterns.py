"""Layouts beyond retrieval: what becomes a span, and what stays text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minipic_backend import PromptError, Text
from minipic_backend.patterns import (
    few_shot,
    old_turns,
    repository,
    sections,
    split_sections,
    tool_schemas,
)


def texts(prompt: Any) -> list[str]:
    return [span.text for span in prompt.spans]


def test_few_shot() -> None:
    prompt = few_shot("Do.", [("a", "b"), ("c", "d")], "e", form="Q: {} A: {}")
    assert texts(prompt) == ["Q: a A: b", "Q: c A: d"]
    assert prompt.messages[1].parts[-1] == Text("e")


def test_equal_tools_have_equal_texts() -> None:
    one = {"name": "weather", "parameters": {"place": "a town"}}
    two = {"parameters": {"place": "a town"}, "name": "weather"}
    prompt = tool_schemas("Call.", [one, two, {"function": {"name": "time"}}], "Now?")
    first, second, third = prompt.spans
    assert first.text == second.text
    assert (first.id, third.id) == ("weather", "time")


def test_repository(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("pass\n")
    assert texts(repository("Read.", [path], "?")) == [f"File {path}:\npass\n"]
    assert texts(repository("Read.", {"b.py": "x"}, "?")) == ["File b.py:\nx"]
    with pytest.raises(PromptError, match="cannot read"):
        repository("Read.", [tmp_path / "none"], "?")


DOCUMENT = """Before.

# Pump

What it is.

## Starting

Open the valve.

### In winter ###

Wait.

## Stopping

Press stop.
"""


def test_sections_stand_under_all_their_headings() -> None:
    assert split_sections(DOCUMENT) == [
        "Before.",
        "Pump\nWhat it is.",
        "Pump > Starting\nOpen the valve.",
        "Pump > Starting > In winter\nWait.",
        "Pump > Stopping\nPress stop.",
    ]
    assert split_sections("No headings.\n\nAt all.") == ["No headings.\n\nAt all."]
    assert split_sections("") == []
    assert len(sections("Read.", [DOCUMENT, "More."], "?").spans) == 6


def test_a_change_in_one_section_leaves_the_others() -> None:
    before, after = split_sections(DOCUMENT), split_sections(DOCUMENT.replace("Wait", "Go"))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("keep", "roles"), [(0, "su"), (1, "suau"), (2, "suauau"), (9, "suauauau")]
)
def test_old_turns(keep: int, roles: str) -> None:
    turns = [("q1", "a1"), ("q2", "a2"), ("q3", "a3")]
    prompt = old_turns("S", turns, "now", keep=keep)
    assert "".join(message.role[0] for message in prompt.messages) == roles
    old = turns[: max(3 - keep, 0)]
    assert texts(prompt) == [f"User: {q}\nAssistant: {a}" for q, a in old]
    assert prompt.messages[-1].parts[-1] == Text("now")
    if old:  # all in the first message that stays
        assert len(prompt.messages[1].parts) == len(old) + 1


def test_old_turns_refuses() -> None:
    with pytest.raises(PromptError, match="keep"):
        old_turns("S", [], "now", keep=-1)
