"""The prompts of `minipic bench cost`, and what it refuses before an engine starts."""

from __future__ import annotations

import pytest

from minipic_backend.bench.cost import draw_work, join_passages
from minipic_backend.cli import main
from minipic_backend.errors import ConfigurationError
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.passages import Passage
from minipic_backend.quality.prompts import PromptForm


class Words:
    """Stands in for an engine whose tokens are words."""

    tokenizer: Words

    def __init__(self) -> None:
        self.tokenizer = self
        self._words: list[str] = []

    def token_ids(self, text: str) -> list[int]:
        self._words += text.split()
        start = len(self._words) - len(text.split())
        return list(range(start, len(self._words)))

    def decode(self, ids: list[int]) -> str:
        return " ".join(self._words[index] for index in ids)


@pytest.mark.parametrize(("documents", "sample", "prompts"), [(10, 8, 100), (1, 1, 1), (2, 3, 20)])
def test_full_attention_can_reuse_no_document(documents: int, sample: int, prompts: int) -> None:
    work = draw_work(
        invented_passages(), case="x", documents=documents, sample=sample, prompts=prompts, runs=2
    )
    questions = [*work.first, *work.alone, *(one for run in work.together for one in run)]
    assert (len(work.alone), *map(len, work.together)) == (sample, prompts, prompts)
    heads = [one.documents[0] for one in questions]
    assert len(set(heads)) == len(heads)
    assert len({frozenset(one.documents) for one in questions}) == len(questions)
    for one in questions:
        assert len(set(one.documents)) == documents
        assert sorted(one.ranks) == list(range(documents))
    # Every document is in other prompts, too: that is what it was "seen before" in.
    assert len(work.documents) <= max(len(questions), documents + 3)


def test_the_same_seed_draws_the_same_prompts() -> None:
    first, same, other = (
        draw_work(invented_passages(), case="x", documents=4, sample=2, prompts=5, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == same != other


def test_too_few_passages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="28 prompts need 28 documents; 27 can be made"):
        draw_work(invented_passages(27), case="x", documents=3, sample=8, prompts=16)


@pytest.mark.parametrize("size", [20, 130, 1000])
def test_passages_are_joined_to_documents_of_one_size(size: int) -> None:
    passages = invented_passages(200)
    documents = join_passages(passages, size, Words(), PromptForm().show)
    assert len(documents) >= 2
    for document in documents:
        assert len(PromptForm().show(document).split()) == size
    titles = [document.title for document in documents]
    assert len(set(titles)) == len(titles)
    assert set(titles) <= {passage.title for passage in passages}


def test_a_passage_without_title_is_joined_too() -> None:
    passages = [Passage("", f"one two three {number}") for number in range(6)]
    documents = join_passages(passages, 6, Words(), PromptForm().show)
    assert [document.text.split()[-1] for document in documents] == ["two"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--techniques full primed:lat=1", "no option 'lat'"),
        ("--techniques primed:budget=7", "budget=7: a share from 0 to 1"),
        ("--techniques epic_paper", "nothing to warm"),
        ("--techniques primed:rank=oracle", "rank does not change costs"),
        ("--techniques unknown", "choose one of"),
        ("--document-tokens 10,20 --prompts 1,2,3", "differ in length"),
        ("--model shape:huge", "Unknown shape 'huge'"),
        ("--model shape:tiny --tokenizer /nowhere/at/all", "no tokenizer for '/nowhere/at/all'"),
        ("--passages /nowhere.jsonl", "/nowhere.jsonl"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cost", *arguments.split()]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("minipic bench-cost: ")
    assert message in told
