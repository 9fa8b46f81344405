"""Questions whose answers stand in the corpus."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QUESTIONS", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and a word of its right answer as the corpus has it."""

    text: str
    answer: str

    def is_answered_by(self, text: str) -> bool:
        return self.answer.casefold() in text.casefold()


QUESTIONS: tuple[Question, ...] = (
    Question("What does the str.upper method return?", "uppercase"),
    Question("What does the power operator bind more tightly than?", "unary"),
    Question("What does an async function definition create?", "coroutine"),
    Question("Which exception is raised by division by zero?", "ZeroDivisionError"),
    Question("What does the str.encode method return?", "bytes"),
    Question(
        "Which statement makes an identifier refer to a binding in the nearest enclosing scope?",
        "nonlocal",
    ),
    Question("Which values are interpreted as false?", "None"),
    Question("What does the str.lower method return?", "lowercase"),
)
"""Picked from some 50 so that a model of 135 million parameters has a chance; with full attention
it answers about a third of those. No measure of quality: that is what `minipic bench` is for."""
