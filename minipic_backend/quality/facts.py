"""Facts that simple rules find in passages written like Wikipedia's first paragraphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from minipic_backend.quality.passages import Passage

__all__ = ["Fact", "find_facts"]

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = rf"(?:\d{{1,2}} (?:{_MONTH}) |(?:{_MONTH}) \d{{1,2}}, )?(\d{{4}})"
# "X (born 4 May 1950) …" and "X (4 May 1950 - 3 March 2001) …"; nothing vague ("c. 1510").
_BORN = re.compile(rf"^[^(]{{2,90}}\(\s*(?:born\s+)?{_DATE}\s*(?:\)|\u2013|-)")
_DIED = re.compile(rf"^[^(]{{2,90}}\([^()\u2013]{{4,40}}\u2013\s*{_DATE}\s*\)")
_NAME = r"(?:[A-Z][\w'\u2019.-]+)(?: (?:[A-Z][\w'\u2019.-]*|de|van|von|der|del|la)){1,3}"
_DIRECTED = re.compile(
    rf"\bdirected by ({_NAME})(?<=\w\w)(?=[.,;]| and starring| starring| from | in \d)"
)
_PLACE = (
    r"[A-Z][\w'\u2019-]+(?: (?:(?:de|del|upon|on) )?[A-Z][\w'\u2019-]+)*(?![\w'\u2019-]| of | -)"
)
_BIRTHPLACE = re.compile(rf"\b(?:was born|born) (?:in|at) ({_PLACE})((?:, {_PLACE})*)")
_LOCATED = re.compile(
    rf"^[^.]{{2,60}} is an? [a-z -]*?(?:village|town|city|municipality|commune|river|district)"
    rf"[a-z ]*? in (?:the )?({_PLACE})((?:, {_PLACE})*)"
)
_RELEASED = re.compile(r"^[^.]{2,80} is an? (\d{4}) (?:[\w-]+ ){0,6}film\b")


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement about a passage's subject.

    Args:
        passage: where it stands.
        relation: "born", "died", "director", "birthplace", "location" or "released".
        values: its object, the preferred spelling first.
    """

    passage: Passage
    relation: str
    values: tuple[str, ...]

    @property
    def year(self) -> int:
        """The object of "born", "died" and "released"."""
        return int(self.values[0])


def find_facts(passages: Iterable[Passage]) -> list[Fact]:
    """All facts, in the order of the passages; none about a subject of which there are two."""
    passages = list(passages)
    namesakes = Counter(passage.subject.casefold() for passage in passages)
    return [
        fact
        for passage in passages
        if namesakes[passage.subject.casefold()] == 1
        for fact in _facts(passage)
    ]


def _facts(passage: Passage) -> list[Fact]:
    text = passage.text.replace("\u2013", " \u2013 ").replace("( ", "(")
    text = re.sub(r" {2,}", " ", text)
    facts = []
    for relation, pattern in (("born", _BORN), ("died", _DIED), ("released", _RELEASED)):
        if match := pattern.search(text):
            facts.append(Fact(passage, relation, (match[1],)))
    if match := _DIRECTED.search(text):
        facts.append(Fact(passage, "director", (match[1].rstrip("."),)))
    is_person = any(fact.relation == "born" for fact in facts)
    for relation, pattern in (("birthplace", _BIRTHPLACE), ("location", _LOCATED)):
        match = pattern.search(text)
        if match and is_person == (relation == "birthplace"):
            whole = match[1] + match[2]
            parts = [part.strip() for part in whole.split(",")]
            spellings = [whole, *(", ".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))]
            if len(parts) > 1:
                spellings.append(parts[-1])
            facts.append(Fact(passage, relation, tuple(dict.fromkeys(spellings))))
    return facts
