"""A server, from Python: run `minipic serve HuggingFaceTB/SmolLM2-135M-Instruct` first.

python examples/serve_remote_engine.py [http://127.0.0.1:8000/v1]    ($MINIPIC_API_KEY: its key)
"""

from __future__ import annotations

import sys

from minipic_backend import Message, Prompt, RemoteEngine, Span, Text

DOCUMENTS = [
    "Lothair II was king of Lotharingia. In 855 he married Teutberga. So the wife of Lothair II "
    "was Teutberga, a daughter of Boso the Elder.",
    "Lotharingia was a medieval kingdom between the rivers Scheldt, Meuse, Rhine and Saône.",
    "Boso the Elder was a count in Italy and the father of Hucbert and Teutberga.",
]


def ask(question: str, documents: list[str]) -> Prompt:
    spans = [Span(text, rank=rank) for rank, text in enumerate(documents)]
    return Prompt.chat(
        [
            Message("system", "Answer from the documents."),
            Message("user", [*spans, Text(question)]),
        ]
    )


def main(base_url: str) -> None:
    with RemoteEngine(base_url) as engine:
        print(engine.explain(ask("Who was the wife of Lothair II?", DOCUMENTS)))
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            prompt = ask("Who was the wife of Lothair II?", documents)
            result = engine.generate(prompt, max_tokens=32, temperature=0.0, late=0)
            usage = result.usage
            print(f"{result.text!r}: {usage.cached_tokens} of {usage.prompt_tokens} tokens cached")
        for chunk in engine.stream(ask("Who was her father?", DOCUMENTS), max_tokens=16):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
