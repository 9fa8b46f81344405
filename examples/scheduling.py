"""Who computes a document that several prompts want: it is computed once, and the others wait.

python examples/scheduling.py [MODEL]
"""

from __future__ import annotations

import sys

from minipic_backend import Engine, Prompt, Span, Text

PASSAGES = [
    "Arlen is a town on the river Mose. Its stone bridge was built in 1774, and its market is held "
    "on Mondays.",
    "Berrow has two mills, both shut, and an old school. Nine hundred people live there.",
    "Calder is known for its castle, which a fire destroyed in 1911. It was never built again.",
    "Dunmore lies on the Ouse. There is nothing much to see, and people leave early.",
]


def main(model: str = "HuggingFaceTB/SmolLM2-135M-Instruct") -> None:
    """Four questions at once, about overlapping documents."""
    with Engine(model, late=0, max_model_len=2048) as engine:
        prompts = [
            Prompt([Text("Towns:\n"), *map(Span, passages), Text(f"Question {number}: which one?")])
            for number, passages in enumerate(
                [PASSAGES[:2], PASSAGES[1:3], PASSAGES[2:] + PASSAGES[:1], PASSAGES[::-1]]
            )
        ]
        print("prompt  span tokens: hit  waited  computed   waited for, ms")
        for number, result in enumerate(engine.generate(prompts, max_tokens=8, temperature=0.0)):
            usage, wait_s = result.usage, result.timing.span_wait_s or 0.0
            print(
                f"{number:6}{usage.span_tokens_hit:18}{usage.span_tokens_waited:8}"
                f"{usage.span_tokens_computed:10}{1000 * wait_s:17.1f}"
            )
        rows = [row for row in engine.explain(prompts[3]).rows if row.kind == "span"]
        print(f"{sum(row.state == 'warm' for row in rows)} of {len(rows)} documents are warm now")


if __name__ == "__main__":
    main(*sys.argv[1:])
