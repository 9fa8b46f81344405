"""What the pages and docstrings point to is there: links, headings, files, modules and names."""

from __future__ import annotations

import ast
import importlib
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("minipic_backend", "integrations", "tests", "examples", "benchmarks", "tools")
PLACES = {page.name: [page] for page in PAGES}
PLACES |= {folder: sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS}
FILES = {path.name for path in [*chain(*PLACES.values()), ROOT / "pyproject.toml"]}
FILES |= {path.name for name in ("benchmarks", "examples") for path in (ROOT / name).rglob("*.*")}
# Where a path may start; pages of a package speak of it by itself.
STARTS = [ROOT, *(ROOT / name for name in ("minipic_backend", "integrations", "docs", "tests"))]
STARTS += [ROOT / "benchmarks" / "results", *(ROOT / "integrations").rglob("minipic")]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_OUTPUT = re.compile(r"--json \S+")
_FILE = re.compile(r"(?<![\w./*-])[\w-]+(?:/[\w.-]+)*\.(?:py|md|json|ipynb|toml)(?![\w*])")
_MODULE = re.compile(
    r"\b(?:minipic_backend|langchain_minipic|llama_index\.llms\.minipic)(?:\.\w+)*"
)
_INSIDE = re.compile(r"(?<![\w./-])((?:\w+/)+\w+\.\w+)(?![\w*])")  # spans/segments.parse_segments


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in links:
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_can_be_copied(page: Path) -> None:
    """It parses, and what goes into a header can stand there."""
    for code in _PYTHON.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.keyword) and node.arg in ("api_key", "auth_token"):
                assert ast.unparse(node.value).isascii(), code


WRITTEN = {"adapt.json"}
"""By commands."""


def names_in(path: Path) -> set[str]:
    """Of files: anywhere in a page, in back quotes in code."""
    text = _OUTPUT.sub("", path.read_text(encoding="utf-8"))
    places = [text] if path.suffix == ".md" else _SPAN.findall(text)
    return set(chain.from_iterable(map(_FILE.findall, places))) - WRITTEN


@pytest.mark.parametrize("paths", PLACES.values(), ids=PLACES)
def test_files_that_are_named_are_there(paths: list[Path]) -> None:
    for path in paths:
        for name in names_in(path):
            starts = [path.parent, *STARTS] if "/" in name else ()
            assert name in FILES or any((start / name).exists() for start in starts), (path, name)


def resolve(name: str) -> Any:
    """A dotted name: modules as far as there are any, then attributes."""
    parts = name.split(".")
    module = importlib.import_module(parts[0])
    found: Any = module
    for place, part in enumerate(parts[1:], 2):
        found = getattr(found, part, None) or importlib.import_module(".".join(parts[:place]))
    return found


@pytest.mark.parametrize("paths", PLACES.values(), ids=PLACES)
def test_names_of_ours_are_there(paths: list[Path]) -> None:
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for name in set(_MODULE.findall(text)) - {"minipic_backend.NoSuchName"}:
            resolve(name)
        for name in chain.from_iterable(map(_INSIDE.findall, _SPAN.findall(text))):
            folder = ROOT / "minipic_backend" / name.split("/")[0]
            if folder.is_dir() and name not in names_in(path):
                resolve("minipic_backend." + name.replace("/", "."))
