"""benchmarks/span_variants.py: caches put together by hand, where the result is known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from minipic_backend.models import ensure_smollm2
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.primers import primer_choices
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import make_questions

FILE = Path(__file__).parents[2] / "benchmarks" / "span_variants.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("span_variants", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["span_variants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PASSAGES = invented_passages(40)
THREE = make_questions(PASSAGES, kinds=["year"], count=1, documents=3)[0]


@pytest.fixture(scope="module")
def caches(script: Any) -> Any:
    """With the documents of `THREE` as pool."""
    form = PromptForm()
    model = str(ensure_smollm2(progress=False))
    pool = [form.show(passage) for passage in THREE.documents]
    return script.Caches(model, form, primer_choices(PASSAGES, form.show), pool)


def test_a_lone_document_behind_the_prefix_is_full_attention(
    script: Any, caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (question,) = make_questions(PASSAGES, kinds=["year"], count=1, documents=1)
    chosen = ("isolated", "prefix", "copy2", "copy2 hidden", "prefix, 1 late")
    monkeypatch.setattr(script, "VARIANTS", {name: script.VARIANTS[name] for name in chosen})
    found = script.measure(caches, question, 3)
    for name in ("prefix", "prefix, 1 late"):
        kl, agreement, same = found[name]
        assert abs(kl) < 1e-5
        assert (agreement, same) == (1.0, True)
    for name in ("isolated", "copy2", "copy2 hidden"):
        assert found[name][0] > 1e-3
    assert found["copy2"] != found["copy2 hidden"]


def test_documents_behind_what_they_stand_behind_are_full_attention(
    script: Any, caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is the prompt's own documents: each stands behind those in front of it."""
    chosen = ("as many passages as in full", "prefix", "own passage", "copy2 hidden, near")
    monkeypatch.setattr(script, "VARIANTS", {name: script.VARIANTS[name] for name in chosen})
    found = script.measure(caches, THREE, 3)
    # but for the gap in positions, which hidden passages leave between prefix and documents
    assert abs(found["as many passages as in full"][0]) < found["prefix"][0] / 4
    assert len({found[name][0] for name in chosen}) == len(chosen)
