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
    Question("What is a lambda expression used to create?", "anonymous functions"),
    Question("Which exception is raised when an assert statement fails?", "AssertionError"),
    Question("Which method is called to create a new instance of a class?", "__new__"),
    Question("Which exception does the del statement raise if the name is unbound?", "NameError"),
    Question("What does a function return without an expression in its return?", "None"),
    Question("Which method is invoked when a with statement is entered?", "__enter__"),
    Question("Which loop does the break statement terminate?", "nearest enclosing"),
    Question("Does a dictionary preserve the order of its items?", "insertion order"),
)
