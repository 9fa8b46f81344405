"""Answers against right answers, as SQuAD scores them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = ["contains", "exact_match", "f1", "normalize"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's evaluation script)."""
    return " ".join(_ARTICLES.sub(" ", text.casefold().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> bool:
    """Whether the answer is one of the right ones, after normalization."""
    return normalize(answer) in {normalize(one) for one in right}


def contains(answer: str, right: Sequence[str]) -> bool:
    """Whether one of the right answers stands in the answer, as whole words."""
    padded = f" {normalize(answer)} "
    return any(f" {normalize(one)} " in padded for one in right if normalize(one))


def f1(answer: str, right: Sequence[str]) -> float:
    """Word overlap with the best-matching right answer, 0 to 1."""
    return max((_f1(normalize(answer).split(), normalize(one).split()) for one in right), default=0)


def _f1(answer: list[str], right: list[str]) -> float:
    common = sum((Counter(answer) & Counter(right)).values())
    if not common:
        return float(answer == right)
    precision, recall = common / len(answer), common / len(right)
    return 2 * precision * recall / (precision + recall)
