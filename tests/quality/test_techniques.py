"""Techniques as one writes them, and the prompts that they see."""

from __future__ import annotations

import pytest

from minipic_backend.errors import ConfigurationError
from minipic_backend.layout.primer import AUTO_PRIMER, own_primer
from minipic_backend.prompt import Span, Text
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.primers import primer_choices
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import Question, make_questions
from minipic_backend.quality.techniques import parse_technique


def test_a_bare_name() -> None:
    spec = parse_technique("block_attention")
    assert (dict(spec.options), dict(spec.prompt)) == ({"technique": "block_attention"}, {})


def test_options_are_sorted_by_who_reads_them() -> None:
    spec = parse_technique("primed:late=2,see_markers=false,offsets=padded,digest=titles,repeat=2")
    assert spec.options == {
        "technique": "primed",
        "late": 2,
        "see_markers": False,
        "offsets": "padded",
    }
    assert spec.prompt == {"digest": "titles", "repeat": 2}


def test_primers_by_name() -> None:
    passages = invented_passages(40)
    choices = primer_choices(passages, PromptForm().show)
    assert parse_technique("primed:primer=none", choices).options["primer"] is False
    assert parse_technique("primed:primer=auto", choices).options["primer"] == "auto"
    assert len(parse_technique("primed:primer=copy4", choices).options["primer"]) == 4
    own = parse_technique("primed:primer=own2", choices).options["primer"]
    assert set(own) <= {PromptForm().show(passage) for passage in passages}
    assert len(choices["long"]()[0]) > 4 * len(choices["copy1"]()[0])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("primed:late", "key=value"),
        ("primed:colour=red", "no option 'colour'; known: "),
        ("primed:digest=all", "digest is one of: none, titles, quotes"),
        ("primed:repeat=0", "a number from 1"),
        ("primed:technique=full", "no option 'technique'"),
        ("primed:primer=plenty", "primer is one of: auto, none"),
    ],
)
def test_what_is_wrong_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_technique(text, primer_choices(invented_passages(4), PromptForm().show))


@pytest.fixture
def question() -> Question:
    return make_questions(invented_passages(60), kinds=["year"], count=1, documents=4)[0]


def show(question: Question, text: str, **form: object) -> tuple[list[Span], str]:
    spec = parse_technique(text)
    prompt = PromptForm(**form).prompt(question, spec, question.oracle_ranks)  # type: ignore[arg-type]
    parts = prompt.messages[-1].parts if prompt.is_chat else prompt.parts
    closing = parts[-1]
    assert isinstance(closing, Text)
    return list(prompt.spans), closing.text


def test_documents_stand_in_order_and_carry_ranks(question: Question) -> None:
    spans, closing = show(question, "primed")
    assert [span.text.split("\n")[0] for span in spans] == [p.title for p in question.documents]
    assert spans[question.relevant[0]].rank == 0
    assert closing == f"Question: {question.text}"
    best_last, _ = show(question, "primed:order=best_last")
    assert [span.rank for span in best_last] == [3, 2, 1, 0]


def test_digest_and_repetition(question: Question) -> None:
    _, closing = show(question, "primed:digest=titles,repeat=2")
    assert closing.count(f"Question: {question.text}") == 2
    assert all(passage.title in closing.split("\n")[0] for passage in question.documents)


def test_quotes_are_the_sentences_that_match_the_question(question: Question) -> None:
    _, closing = show(question, "primed:digest=quotes")
    passage = question.documents[question.relevant[0]]
    _, *quotes = closing.split("\n\n")[0].split("\n")
    assert len(quotes) == 3
    assert any(quote.startswith(f"{passage.title}: {passage.title} (") for quote in quotes)


def test_the_users_document_form_and_models_without_chats(question: Question) -> None:
    spans, closing = show(question, "primed", document="[{title}] {text}", chat=False)
    assert spans[0].text.startswith(f"[{question.documents[0].title}] ")
    assert closing.endswith("\nAnswer:")


def test_the_standard_primer_is_the_one_that_was_measured() -> None:
    """docs/quality.md gives its figures as `copy2`."""
    choices = primer_choices(invented_passages(4), PromptForm().show)
    assert choices["copy2"]() == AUTO_PRIMER


def test_an_own_primer_is_of_middle_length() -> None:
    texts = ["x" * length for length in (9, 1, 5, 3, 7, 5)]
    assert own_primer(texts, 2) == ("x" * 3, "x" * 5)
    assert own_primer(texts[:1]) == ("x" * 9,)
