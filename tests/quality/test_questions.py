"""Facts, questions made from them, and the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minipic_backend.errors import ConfigurationError
from minipic_backend.quality.facts import find_facts
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.kinds import KINDS
from minipic_backend.quality.passages import Passage, load_passages
from minipic_backend.quality.questions import Question, make_questions, read_questions


@pytest.mark.parametrize(
    ("text", "relation", "values"),
    [
        ("Ann Lee( born 29 February 1736) was a preacher.", "born", ("1736",)),
        ("Ann Lee (May 3, 1736 – 8 September 1784) was a preacher.", "born", ("1736",)),
        ("Ann Lee (1736 – 8 September 1784) was a preacher.", "died", ("1784",)),
        ("Red Dust is a 1932 American film directed by Victor Fleming.", "released", ("1932",)),
        ("Red Dust was directed by Victor Fleming, in 1932.", "director", ("Victor Fleming",)),
        (
            "Ann Lee (born 1736) was born in Leeds, Yorkshire, and died young.",
            "birthplace",
            ("Leeds, Yorkshire", "Leeds", "Yorkshire"),
        ),
        ("Hawes is a small market town in Wensleydale.", "location", ("Wensleydale",)),
    ],
)  # fmt: skip
def test_a_fact_is_found(text: str, relation: str, values: tuple[str, ...]) -> None:
    facts = {fact.relation: fact.values for fact in find_facts([Passage("X", text)])}
    assert facts[relation] == values


@pytest.mark.parametrize(
    "text",
    [
        "Alonso Mudarra( c. 1510 – April 1, 1580) was a composer.",
        "John Adams( 1672 or 1673 – 1745) was a merchant.",
        "It was written and directed by his brother.",
        "Charles was born in the spring of 1921.",
        "Silent Voices may refer to:",
    ],
)
def test_what_is_vague_is_no_fact_about_birth_or_name(text: str) -> None:
    relations = {fact.relation for fact in find_facts([Passage("X", text)])}
    assert not relations & {"born", "director", "birthplace"}


def test_namesakes_are_left_out() -> None:
    text = "Caresses is a 1998 film directed by Ventura Pons."
    assert find_facts([Passage("Caresses", text), Passage("Caresses (film)", text)]) == []


def test_invented_passages_are_the_same_every_time_and_make_every_kind() -> None:
    passages = invented_passages(200)
    assert passages == invented_passages(200)
    assert len({passage.title for passage in passages}) == 200
    questions = make_questions(passages, kinds=KINDS, count=12, documents=8)
    assert [question.kind for question in questions] == [k for k in KINDS for _ in range(12)]
    assert questions == make_questions(passages, kinds=KINDS, count=12, documents=8)
    assert questions != make_questions(passages, kinds=KINDS, count=12, documents=8, seed=1)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return make_questions(invented_passages(), kinds=KINDS, count=30, documents=8)


def test_the_answer_stands_in_the_relevant_documents_alone(questions: list[Question]) -> None:
    for question in questions:
        assert len(question.documents) == len({p.title for p in question.documents}) == 8
        assert len(question.relevant) == (2 if question.kind == "comparison" else 1)
        if question.kind == "yes_no":
            continue
        for index in question.relevant:
            text = question.documents[index].text
            if question.kind != "comparison":
                assert question.answers[0] in text
            assert question.documents[index].subject in question.text


def test_yes_and_no_are_balanced_and_true(questions: list[Question]) -> None:
    asked = [question for question in questions if question.kind == "yes_no"]
    assert 9 <= sum(question.answers == ("yes",) for question in asked) <= 21
    for question in asked:
        value = question.text.removesuffix("?").split(" by ")[-1].split(" in ")[-1]
        text = question.documents[question.relevant[0]].text
        head = text.split(" – ")[0]  # a false year may be that of the death
        assert (value in (head if value.isdecimal() else text)) == (question.answers == ("yes",))


def test_the_relevant_document_stands_anywhere(questions: list[Question]) -> None:
    places = [index for question in questions for index in question.relevant]
    assert set(places) == set(range(8))


def test_ranks_are_places(questions: list[Question]) -> None:
    for question in questions:
        assert sorted(question.ranks) == sorted(question.oracle_ranks) == list(range(8))
        best = {question.oracle_ranks.index(place) for place in range(len(question.relevant))}
        assert best == set(question.relevant)


def test_documents_alike_state_the_same_kind_of_fact() -> None:
    passages = invented_passages()
    for question in make_questions(passages, kinds=["year"], count=5, documents=8, alike=True):
        assert len(find_facts(question.documents)) >= 8
        assert all("born in" in passage.text for passage in question.documents)


def test_what_cannot_be_asked_is_refused() -> None:
    passages = [Passage(f"T{n}", "Nothing to ask.") for n in range(9)]
    with pytest.raises(ConfigurationError, match="'year'"):
        make_questions(passages, kinds=["year"], count=1, documents=3)
    with pytest.raises(ConfigurationError, match="known: year"):
        make_questions(passages, kinds=["colour"], count=1, documents=3)
    with pytest.raises(ConfigurationError, match="9 passages"):
        make_questions(passages, kinds=["year"], count=1, documents=10)


def test_own_questions(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    rows = [
        {"question": "Who?", "documents": ["A.", {"title": "B", "text": "b."}], "answers": "A"},
        {"question": "What?", "documents": ["C."], "kind": "hard", "relevant": [0]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_questions(path)
    assert first.documents == (Passage("", "A."), Passage("B", "b."))
    assert (first.kind, first.answers, first.ranks) == ("own", ("A",), (0, 1))
    assert (second.kind, second.answers, second.relevant) == ("hard", (), (0,))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "line 1: not a JSON object"),
        ('{"question": "Who?"}', "line 1: a question has"),
        ('{"question": "Who?", "documents": [1]}', "line 1: a document is"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigurationError, match=complaint):
        read_questions(path)


def test_passages_are_read_once_each(tmp_path: Path) -> None:
    path = tmp_path / "passages.jsonl"
    path.write_text('{"title": "A (film)", "text": "a"}\n\n{"title": "A (film)", "text": "b"}\n')
    (passage,) = load_passages(path)
    assert (passage.text, passage.subject) == ("a", "A")
    path.write_text('{"text": "a"}')
    with pytest.raises(ConfigurationError, match="'title' is missing"):
        load_passages(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        load_passages(tmp_path / "none.jsonl")
