"""Passages about people, films and places that do not exist, the same on every machine.

No model has read them, so nothing but the prompt can tell the answers. They are written like the
first paragraph of an encyclopedia's article, so that the rules of `facts` apply.
"""

from __future__ import annotations

import random

from minipic_backend.quality.passages import Passage

__all__ = ["invented_passages"]

# fmt: off
_FIRST = (
    "Adela", "Bruno", "Cosima", "Dario", "Elvin", "Farah", "Gregor", "Helma", "Ivo", "Jorun",
    "Kasimir", "Ludmila", "Marek", "Nerissa", "Odo", "Petra", "Quentin", "Rosalba", "Silvan",
    "Tamsin", "Ulrik", "Vera", "Wendel", "Ximena", "Yorick", "Zelda",
)
_LAST_HEADS = (
    "Ash", "Bren", "Cald", "Dorn", "Eller", "Fenn", "Gar", "Hol", "Ister", "Jann", "Kest", "Lor",
    "Mar", "Nor", "Orl", "Pell", "Quar", "Ros", "Sten", "Thorn", "Ul", "Var", "Wex", "Yar",
    "Zel",
)
_LAST_TAILS = (
    "ov", "ham", "sen", "berg", "wick", "ano", "elli", "ström", "dale", "mann", "vik", "by",
)
_TOWN_HEADS = (
    "Alder", "Brook", "Clar", "Dun", "East", "Fair", "Glen", "Harrow", "Iron", "Juniper", "King",
    "Lang", "Mill", "North", "Oak", "Port", "Queens", "Raven", "Silver", "Tern",
)
_TOWN_TAILS = (
    "ford", "mouth", "field", "stead", "haven", "wick", "burgh", "bridge",
)
_REGIONS = (
    "Cordelia", "Marenne", "Ostrava", "Veldt", "Tessaly", "Norrland", "Galicia", "Brabant",
    "Wexmoor", "Savonia",
)
_WORKS = (
    "botanist", "composer", "chess player", "sculptor", "painter", "surgeon", "poet", "rower",
    "translator", "bishop",
)
_NATIONS = (
    "Danish", "Portuguese", "Canadian", "Hungarian", "Swedish", "Finnish", "Chilean", "Dutch",
    "Scottish", "Czech",
)
_ADJECTIVES = (
    "Silent", "Crimson", "Distant", "Broken", "Golden", "Hidden", "Restless", "Northern",
    "Paper", "Winter",
)
_NOUNS = (
    "Harbour", "Orchard", "Letter", "Bridge", "Season", "Mirror", "Garden", "Voyage", "Promise",
    "Lantern",
)
_GENRES = (
    "drama", "comedy", "silent", "war", "thriller", "musical", "crime", "mystery",
)
_MONTHS = (
    "January", "March", "April", "June", "August", "September", "October", "December",
)
# fmt: on

_PERSON_REST = (
    "{last} studied in {town2} and later taught there for {n} years.",
    "Together with a brother, {last} ran a small workshop that employed {n} people.",
    "A collection of {n} letters is kept in the library of {town2}.",
    "{last} received the medal of the city of {town2} and never left the region again.",
    "Critics valued the early work most, of which {n} pieces survive.",
)
_FILM_REST = (
    "It was shot in {town2} within {n} days.",
    "The music is by {name2}, who also appears in a small role.",
    "The film stars {name2} and was shown at {n} festivals.",
    "It tells of two sisters who inherit a mill near {town2}.",
)
_PLACE_REST = (
    "It has {n} houses, a school and a covered market.",
    "The railway from {town2} was closed after {n} years of service.",
    "It is known for its apple fair, which draws visitors from {town2}.",
    "A stone bridge of {n} arches crosses the stream.",
)


def invented_passages(count: int = 600, seed: int = 0) -> list[Passage]:
    """`count` passages: half of them people, then films, then places; no subject twice."""
    rng = random.Random(seed)
    makers = (_person, _film, _person, _place)
    passages: dict[str, Passage] = {}
    while len(passages) < count:
        passage = makers[len(passages) % len(makers)](rng)
        passages.setdefault(passage.title, passage)
    return list(passages.values())


def _person(rng: random.Random) -> Passage:
    name, birth = _name(rng), rng.randint(1720, 1940)
    dates = f"{_date(rng)} {birth} \u2013 {_date(rng)} {birth + rng.randint(38, 90)}"
    text = (
        f"{name} ({dates}) was a {rng.choice(_NATIONS)} {rng.choice(_WORKS)}, "
        f"born in {_town(rng)}, {rng.choice(_REGIONS)}."
    )
    return Passage(name, f"{text} {_rest(rng, _PERSON_REST, name)}")


def _film(rng: random.Random) -> Passage:
    title = f"The {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} of {_town(rng)}"
    text = (
        f"{title} is a {rng.randint(1921, 2015)} {rng.choice(_NATIONS)} {rng.choice(_GENRES)} "
        f"film directed by {_name(rng)}."
    )
    return Passage(title, f"{text} {_rest(rng, _FILM_REST, title)}")


def _place(rng: random.Random) -> Passage:
    name = f"{_town(rng)} {rng.choice(('Green', 'Hill', 'Cross', 'End', 'Moor'))}"
    kind = rng.choice(("village", "town", "small town", "municipality"))
    text = f"{name} is a {kind} in {_town(rng)} County, {rng.choice(_REGIONS)}."
    return Passage(name, f"{text} {_rest(rng, _PLACE_REST, name)}")


def _rest(rng: random.Random, sentences: tuple[str, ...], subject: str) -> str:
    values = {"last": subject.split()[-1], "town2": _town(rng), "name2": _name(rng)}
    chosen = rng.sample(sentences, rng.randint(2, 3))
    return " ".join(one.format(n=rng.randint(3, 60), **values) for one in chosen)


def _name(rng: random.Random) -> str:
    return f"{rng.choice(_FIRST)} {rng.choice(_LAST_HEADS)}{rng.choice(_LAST_TAILS)}"


def _town(rng: random.Random) -> str:
    return rng.choice(_TOWN_HEADS) + rng.choice(_TOWN_TAILS)


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"
