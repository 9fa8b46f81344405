"""The engine without a framework: text and spans, streamed, warmed and explained.

make setup && .venv/bin/python examples/engine.py
"""

from __future__ import annotations

from minipic_backend import Engine, Message, Prompt, Span, Text

DOCUMENTS = [
    "Ada Lovelace was born in London in 1815 and wrote about the Analytical Engine.",
    "Alan Turing was born in London in 1912 and worked at Bletchley Park.",
    "Grace Hopper was born in New York City in 1906 and wrote the A-0 compiler.",
]


def ask(question: str, documents: list[str]) -> Prompt:
    # `rank`: the caller's order of relevance. The best one goes last, computed in full context.
    spans = [Span(text, rank=rank) for rank, text in enumerate(documents)]
    return Prompt.chat(
        [
            Message("system", "Answer from the documents."),
            Message("user", [*spans, Text(f"Question: {question}")]),
        ]
    )


def main() -> None:
    options = {"max_tokens": 24, "temperature": 0.0}
    with Engine("HuggingFaceTB/SmolLM2-135M-Instruct", max_model_len=2048) as engine:
        first = ask("Where was Grace Hopper born?", DOCUMENTS[::-1])
        report = engine.warm(DOCUMENTS, prompt=first)
        print(f"warmed {report.num_spans} spans, {report.num_computed_tokens} tokens computed")
        print(engine.explain(first))
        for chunk in engine.stream(first, **options):
            print(chunk.text, end="", flush=True)
            if chunk.usage:
                print("\n  ", chunk.usage)
        result = engine.generate(ask("Who worked at Bletchley Park?", DOCUMENTS), **options)
        print(result.text, "\n  ", result.usage, result.timing)


if __name__ == "__main__":
    main()
