"""Spans beyond retrieval: examples, tools, files, sections, old turns, and a schema's modules.

make setup && .venv/bin/python examples/patterns.py
"""

from __future__ import annotations

from minipic_backend import Engine, Prompt
from minipic_backend.patterns import few_shot, old_turns, repository, sections, tool_schemas
from minipic_backend.prompt_cache import Module, Parameter, Schema, Union

EXAMPLES = [
    ("The food was cold.", "negative"),
    ("What a lovely evening!", "positive"),
    ("It arrived on Tuesday.", "neutral"),
]
TOOLS = [
    {"name": name, "description": f"Find the {what} of a place.", "parameters": ["place"]}
    for name, what in (("weather", "weather"), ("time", "local time"), ("news", "latest news"))
]
FILES = {
    "app.py": "from greet import hello\n\nhello('world')\n",
    "greet.py": "def hello(name):\n    print(f'Hello, {name}!')\n",
}
MANUAL = "# Pump\n\n## Starting\n\nOpen the valve, press start.\n\n## Stopping\n\nPress stop, wait."
TURNS = [
    ("My name is Ada.", "Nice to meet you, Ada."),
    ("I live in Turin.", "A city with many arcades."),
    ("I like tea.", "Green or black?"),
]
TRIP = Schema(
    "trip",
    [
        Module("plan", ["A trip of ", Parameter("days", length=4), " days."]),
        Union([Module("miami", "Miami has beaches."), Module("paris", "Paris has museums.")]),
    ],
    system="You plan trips.",
)


def pairs() -> dict[str, tuple[Prompt, Prompt]]:
    """Of each layout a first prompt, and one that shares spans with it in other places."""
    classify, review = "Classify the review.", "Review: Not bad."
    file_question = "What does app.py print?"
    edited = {**FILES, "app.py": "from greet import hello\n\nhello('moon')\n"}
    longer = MANUAL.replace("press start", "press start twice")
    return {
        "few-shot examples": (
            few_shot(classify, EXAMPLES, review),
            few_shot(classify, EXAMPLES[::-1], review),
        ),
        "tool schemas": (
            tool_schemas("Call a tool.", TOOLS, "How warm is it in Oslo?"),
            tool_schemas("Call a tool.", TOOLS[1:], "What is the time in Oslo?"),
        ),
        "files of a repository": (
            repository("Answer briefly.", FILES, file_question),
            repository("Answer briefly.", edited, file_question),
        ),
        "sections of a document": (
            sections("Answer from the manual.", [MANUAL], "How is it stopped?"),
            sections("Answer from the manual.", [longer], "How is it stopped?"),
        ),
        "old turns of a chat": (
            old_turns("You are helpful.", TURNS, "What did I say I like?", keep=1),
            old_turns("You are helpful.", TURNS[1:], "Where do I live?", keep=1),
        ),
        "modules of a schema": (
            TRIP.prompt("Where to go?", {"plan": {"days": "three"}, "miami": {}}),
            TRIP.prompt("Where to go?", {"plan": {"days": "ten"}, "paris": {}}),
        ),
    }


def main() -> None:
    with Engine("HuggingFaceTB/SmolLM2-135M-Instruct", max_model_len=2048) as engine:
        for name, (first, second) in pairs().items():
            technique = "prompt_cache" if name == "modules of a schema" else "block_attention"
            options = {"technique": technique, "max_tokens": 12, "temperature": 0.0}
            engine.generate(first, **options)
            print(f"\n{name}: the second prompt, with spans of the first warm")
            print(engine.explain(second, technique=technique))
            result = engine.generate(second, **options)
            usage = result.usage
            print(f"{usage.cached_tokens} of {usage.prompt_tokens} tokens cached: {result.text!r}")


if __name__ == "__main__":
    main()
