"""The demo's passages, retriever and questions."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

import pytest

from minipic_backend.demo.corpus import (
    MAX_SIZE,
    MIN_SIZE,
    Passage,
    load_passages,
    size,
    split_topic,
)
from minipic_backend.demo.questions import QUESTIONS

TOPIC = """The "with" statement
********************

The "with" statement *wraps* the execution of a block with methods
defined by a **context manager**. [1] It has comma-
separated items, and this paragraph is long enough to stand alone as a
passage of the collection, which takes some three hundred characters of
text to be the case, and so it goes on for a while until it has them.

   with_stmt ::= "with" ( "(" with_stmt_contents ")" ) ":" suite

The following code:

   with EXPRESSION as TARGET:
       SUITE

See also:

  **PEP 343** - The "with" statement
     The specification, background, and examples.

Next
====

Too short to stand alone.
"""


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    return load_passages()


def test_markup_grammar_and_headings() -> None:
    (passage,) = split_topic("with", TOPIC)
    assert (passage.id, passage.title) == ("with-0", 'The "with" statement')
    assert "::=" not in passage.text
    assert "[1]" not in passage.text
    assert "***" not in passage.text
    assert "wraps the execution of a block with methods defined by a context" in passage.text
    assert "comma-separated" in passage.text
    assert "The following code:\nwith EXPRESSION as TARGET:\n    SUITE" in passage.text
    assert "Too short" not in passage.text


def test_there_are_enough_real_passages(passages: list[Passage]) -> None:
    assert len(passages) >= 200
    assert all(MIN_SIZE <= size(passage.text) <= MAX_SIZE for passage in passages)
    assert all(passage.title.strip() for passage in passages)


def test_ids_and_texts_are_unique_and_stable(passages: list[Passage]) -> None:
    assert len({passage.id for passage in passages}) == len(passages)
    assert len({passage.text for passage in passages}) == len(passages)
    assert load_passages() == passages


def test_passages_are_clean(passages: list[Passage]) -> None:
    noise = re.compile(r"::=|^[*=\-~^+|]{4,}$|\+---|\t|[^\S\n]$", re.MULTILINE)
    assert [passage.id for passage in passages if noise.search(passage.text)] == []


def test_passages_are_about_150_tokens(passages: list[Passage], smollm2_tokenizer: Any) -> None:
    sizes = sorted(len(smollm2_tokenizer.encode(passage.content)) for passage in passages)
    assert 120 <= median(sizes) <= 180
    assert sizes[len(sizes) // 20] >= 70
    assert sizes[-len(sizes) // 20] <= 200


@pytest.fixture(scope="module")
def retriever(passages: list[Passage]) -> Any:
    from minipic_backend.demo.retriever import PassageRetriever

    return PassageRetriever.over(passages)


def test_retriever_gives_ten_documents_best_first(retriever: Any) -> None:
    documents = retriever.invoke("What is a lambda expression?")
    assert len(documents) == len({document.id for document in documents}) == 10
    assert documents[0].id == "lambda-0"
    scores = [document.metadata["score"] for document in documents]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.answer)
def test_answers_stand_in_what_is_retrieved(retriever: Any, question: Any) -> None:
    documents = retriever.invoke(question.text)
    assert any(question.is_answered_by(document.page_content) for document in documents)


def test_retriever_refuses_more_documents_than_there_are(passages: list[Passage]) -> None:
    from minipic_backend.demo.retriever import PassageRetriever

    with pytest.raises(ValueError, match="from 1 to"):
        PassageRetriever.over(passages[:3], k=4)
