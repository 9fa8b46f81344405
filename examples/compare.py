"""What each technique answers to one prompt, and how far it is from full attention.

make setup && .venv/bin/python examples/compare.py
"""

from __future__ import annotations

from minipic_backend import Engine, Message, Prompt, Span, Text

DOCUMENTS = [
    "Grace Hopper was born in New York City in 1906 and wrote the A-0 compiler.",
    "Ada Lovelace was born in London in 1815 and wrote about the Analytical Engine.",
    "Alan Turing was born in London in 1912 and worked at Bletchley Park.",
]


def main() -> None:
    spans = [Span(text, rank=rank) for rank, text in enumerate(DOCUMENTS)]
    question = Text("Question: Where was Grace Hopper born?")
    prompt = Prompt.chat([Message("user", [*spans, question])])
    techniques = ["full", "primed", "primed:late=0", "block_attention", "epic:blocks=1"]
    with Engine("HuggingFaceTB/SmolLM2-135M-Instruct", max_model_len=2048) as engine:
        report = engine.warm(DOCUMENTS, prompt=prompt)
        print(f"warmed {report.num_spans} spans")
        # KL: mean divergence from full attention along its answer, in nats; "=": the same answer.
        print(engine.compare(prompt, techniques, max_tokens=24))


if __name__ == "__main__":
    main()
