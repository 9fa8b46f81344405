"""What messages of errors show of values that callers gave."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipic_backend import PromptError, errors
from minipic_backend.errors import shown
from minipic_backend.prompt_cache.json_form import prompt_from_json

ROOT = Path(__file__).parent.parent


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


VALUES = {
    "long": "x" * 10**6,
    "wide": ["x" * 100] * 10**4,
    "wide and deep": [[[[["x" * 100] * 6] * 6] * 6] * 6] * 6,
    "deep": deep(),
    "odd": "\ud800" * 500,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_is_shown_in_a_line(value: Any) -> None:
    for one in (value, [value], {"a": value}):
        assert len(shown(one).encode()) <= 400
    with pytest.raises(PromptError) as caught:
        prompt_from_json({"schema": value, "text": value})
    assert len(str(caught.value).encode()) < 1000


def test_short_values_are_shown_whole() -> None:
    for value in ("a", 3, None, ["a", 1.5], {"k": ("v",)}):
        assert shown(value) == repr(value)


def messages(tree: ast.AST) -> Iterator[ast.Call]:
    """Where one of our errors is made."""
    names = {name for name in errors.__all__ if name.endswith("Error")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if name in names:
                yield node


def test_no_message_holds_a_value_however_long_it_is() -> None:
    """Values stand in them as `shown` shows them, not as `repr` does."""
    count = 0
    for folder in ("minipic_backend", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in messages(ast.parse(path.read_text("utf-8"))):
                count += 1
                for node in ast.walk(call):
                    whole = isinstance(node, ast.FormattedValue) and node.conversion == ord("r")
                    if whole and isinstance(node.value, ast.Name) and node.value.id.isupper():
                        continue  # a constant of ours
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                        whole |= node.func.id == "repr"
                    assert not whole, f"{path.relative_to(ROOT)}:{call.lineno}"
    assert count > 100
