"""What an isolated span lacks: variants that the engine has no option for, in transformers.

Caches are put together by hand: each document is computed behind a frame, its keys are turned to
where it stands, and the question reads the whole. Measured against full attention, along its own
answer: KL over the whole vocabulary, agreement, and whether every token of the answer agrees.

    python benchmarks/span_variants.py MODEL PASSAGES.jsonl --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from minipic_backend.quality.passages import load_passages
from minipic_backend.quality.primers import primer_choices
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import Question, make_questions

KV = list[tuple[Tensor, Tensor]]  # per layer: [batch, num_kv_heads, tokens, head_size], twice
HIDDEN = -30000.0
_DOCUMENTS = "@@DOCUMENTS@@"


@dataclass(frozen=True)
class Variant:
    """How spans are computed, and how the question sees them.

    Args:
        frame: "none" or "prefix".
        primer: its name in `primer_choices`.
        hidden: the question does not see the primer; spans do.
        own: each document stands behind that many further passages of its own, chosen by its text,
            which nobody else sees.
        in_place: behind as many as there are documents in front of it.
        twice: behind itself.
        near: the question sees every document as if it stood right in front.
        gap: positions left free between the frame and a span while it is computed.
        scale: factor of spans' keys.
        bias: added to the scores of spans' tokens.
        first_bias: added to those of each span's first token, too.
        late: relevant documents computed in context, last.
    """

    frame: str = "prefix"
    primer: str = "none"
    hidden: bool = False
    own: int = 0
    in_place: bool = False
    twice: bool = False
    near: bool = False
    gap: int = 0
    scale: float = 1.0
    bias: float = 0.0
    first_bias: float = 0.0
    late: int = 0


PRIMED = Variant(primer="copy2")
VARIANTS = {
    "isolated": Variant(frame="none"),
    "isolated, first tokens hidden": Variant(frame="none", first_bias=HIDDEN),
    "prefix": Variant(),
    "prefix, 300 further on": Variant(gap=300),
    "plain": Variant(primer="plain"),
    "copy2": PRIMED,
    "copy2 hidden": replace(PRIMED, hidden=True),
    "copy4": Variant(primer="copy4"),
    "copy4 hidden": Variant(primer="copy4", hidden=True),
    "own4": Variant(primer="own4"),
    "own8": Variant(primer="own8"),
    "own passage": Variant(own=1),
    "own 2 passages": Variant(own=2),
    "own 4 passages": Variant(own=4),
    "as many passages as in full": Variant(in_place=True),
    "copy2 hidden, itself": replace(PRIMED, hidden=True, twice=True),
    "copy2 hidden, near": replace(PRIMED, hidden=True, near=True),
    "copy2, first tokens hidden": replace(PRIMED, first_bias=HIDDEN),
    "copy2, bias -1": replace(PRIMED, bias=-1.0),
    "copy2, bias 0.5": replace(PRIMED, bias=0.5),
    "copy2, keys times 1.05": replace(PRIMED, scale=1.05),
    "prefix, 1 late": Variant(late=1),
    "copy2, 1 late": replace(PRIMED, late=1),
    "copy2, 2 late": replace(PRIMED, late=2),
}


class Caches:
    """A model, and caches made of parts."""

    def __init__(
        self, path: str, form: PromptForm, primers: dict[str, Any], pool: Sequence[str] = ()
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=self.dtype, attn_implementation="sdpa"
        )
        self.model.to(self.device).eval()
        self.form = form
        self.primers = primers
        self.pool = [self.encode(text.rstrip() + "\n\n") for text in pool]
        self.prefix = cache(self._prefix)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def around(self, question: Question) -> tuple[str, str]:
        """Text in front of the documents and behind them."""
        messages = [
            {"role": "system", "content": self.form.system},
            {"role": "user", "content": f"{_DOCUMENTS}Question: {question.text}"},
        ]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        head, tail = text.split(_DOCUMENTS)
        return head, tail

    def run(
        self,
        rows: Tensor,
        start: int,
        past: KV | None = None,
        bias: Tensor | None = None,
        keep: int = 1,
    ) -> tuple[Tensor, KV]:
        """Logits of the last `keep` tokens, and the new keys and values.

        Args:
            rows: token ids, [batch, tokens], at positions from `start`.
            start: see there.
            past: what they see, `bias` added to the scores ([tokens of past]).
            bias: see there.
            keep: see above.
        """
        (batch, count), before = rows.shape, past[0][0].shape[2] if past else 0
        held = DynamicCache()
        for layer, (key, value) in enumerate(past or []):
            held.update(key, value, layer)
        mask = torch.zeros(batch, 1, count, before + count, dtype=self.dtype, device=self.device)
        mask[..., before:] = torch.full((count, count), HIDDEN, device=self.device).triu(1)
        if bias is not None:
            mask[..., :before] += bias.to(self.dtype)
        positions = torch.arange(start, start + count, device=self.device).expand(batch, -1)
        out = self.model(
            rows,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=held,
            logits_to_keep=keep,
        )
        new = [(layer.keys[:, :, before:], layer.values[:, :, before:]) for layer in held.layers]
        return out.logits, new

    def row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)

    def turned(self, keys: Tensor, shift: int) -> Tensor:
        """Keys moved by `shift` positions."""
        angles = shift * self.model.model.rotary_emb.inv_freq.float()
        a, b = keys.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(keys.dtype)

    def _prefix(self, head: str, primer: str) -> tuple[KV, int, int]:
        """The prefix, its tokens, and those in front of the primer."""
        passages = self.primers[primer]() or ()
        ids = self.encode(head + "".join(passage.rstrip() + "\n\n" for passage in passages))
        return self.run(self.row(ids), 0)[1], len(ids), len(self.encode(head))

    def fronts(self, documents: Sequence[Sequence[int]], variant: Variant) -> list[list[int]]:
        """What each document alone stands behind."""
        fronts: list[list[int]] = []
        for index, ids in enumerate(documents):
            passages = self.pool[:index] if variant.in_place else []
            if variant.own:
                groups = len(self.pool) // variant.own
                first = crc32(repr(ids).encode()) % groups * variant.own
                passages = self.pool[first : first + variant.own]
            front = [token for passage in passages for token in passage]
            fronts.append([*front, *ids] if variant.twice else front)
        return fronts

    def spans(
        self,
        frame: KV | None,
        start: int,
        documents: Sequence[Sequence[int]],
        fronts: Sequence[Sequence[int]],
    ) -> list[KV]:
        """Each document by itself behind `frame` and its own front, all in one batch."""
        if not documents:
            return []
        both = [[*front, *ids] for front, ids in zip(fronts, documents, strict=True)]
        rows = torch.zeros(len(both), max(map(len, both)), dtype=torch.long, device=self.device)
        for index, ids in enumerate(both):
            rows[index, : len(ids)] = torch.tensor(ids, device=self.device)
        past = [
            (key.expand(len(documents), -1, -1, -1), value.expand(len(documents), -1, -1, -1))
            for key, value in frame or []
        ]
        _, new = self.run(rows, start, past or None)
        own = [slice(len(front), len(ids)) for front, ids in zip(fronts, both, strict=True)]
        return [
            [(key[i : i + 1, :, part], value[i : i + 1, :, part]) for key, value in new]
            for i, part in enumerate(own)
        ]

    def context(
        self, head: str, documents: Sequence[Sequence[int]], variant: Variant
    ) -> tuple[KV, Tensor, int]:
        """Prefix and spans as the question sees them, biases, and the next position."""
        prefix, at, head_tokens = self.prefix(head, variant.primer)
        framed = variant.frame == "prefix"
        base = at + variant.gap if framed else 0
        biases = [torch.zeros(at, device=self.device)]
        if variant.hidden:
            biases[0][head_tokens:] = HIDDEN
        parts = [prefix]
        fronts = self.fronts(documents, variant)
        spans = self.spans(prefix if framed else None, base, documents, fronts)
        at += max(map(len, fronts), default=0)
        end = at + max(map(len, documents), default=0)
        for ids, front, span in zip(documents, fronts, spans, strict=True):
            at = end - len(ids) if variant.near else at
            shift = at - base - len(front)
            parts.append([(self.turned(k, shift) * variant.scale, v) for k, v in span])
            bias = torch.full((len(ids),), variant.bias, device=self.device)
            bias[0] += variant.first_bias
            biases.append(bias)
            at += len(ids)
        return joined(parts), torch.cat(biases), at

    def along(
        self, past: KV, bias: Tensor, at: int, tail: Sequence[int], answer: Sequence[int]
    ) -> Tensor:
        """Log-probabilities at each token of the answer: float32 [tokens, vocabulary]."""
        ids = self.row([*tail, *answer[:-1]])
        logits, _ = self.run(ids, at, past, bias, keep=len(answer))
        return logits[0].float().log_softmax(-1)

    def full(
        self,
        head: Sequence[int],
        documents: Sequence[Sequence[int]],
        tail: Sequence[int],
        most: int,
    ) -> tuple[list[int], Tensor]:
        """Full attention's greedy answer, and its log-probabilities along it."""
        front = [*head, *(token for ids in documents for token in ids)]
        _, context = self.run(self.row(front), 0)
        zero = torch.zeros(len(front), device=self.device)
        answer: list[int] = []
        while len(answer) < most and answer[-1:] != [self.tokenizer.eos_token_id]:
            logits, _ = self.run(self.row([*tail, *answer]), len(front), context, zero)
            answer.append(int(logits[0, -1].argmax()))
        return answer, self.along(context, zero, len(front), tail, answer)


def joined(parts: Sequence[KV]) -> KV:
    """Parts one behind another."""
    return [
        (torch.cat([k for k, _ in layer], dim=2), torch.cat([v for _, v in layer], dim=2))
        for layer in zip(*parts, strict=True)
    ]


@torch.no_grad()
def measure(caches: Caches, question: Question, most: int) -> dict[str, tuple[float, float, bool]]:
    """KL, agreement, and whether the whole answer agrees, of each variant."""
    head, closing = caches.around(question)
    documents = [caches.encode(caches.form.show(p) + "\n\n") for p in question.documents]
    tail = caches.encode(closing)
    answer, truth = caches.full(caches.encode(head), documents, tail, most)
    best = sorted(range(len(documents)), key=lambda index: -question.oracle_ranks[index])
    found = {}
    for name, variant in VARIANTS.items():
        late = best[len(best) - variant.late :]
        early = [ids for index, ids in enumerate(documents) if index not in late]
        past, bias, at = caches.context(head, early, variant)
        closing_ids = [token for index in late for token in documents[index]] + tail
        along = caches.along(past, bias, at, closing_ids, answer)
        kl = (truth.exp() * (truth - along)).sum(-1).mean()
        same = along.argmax(-1) == torch.tensor(answer, device=along.device)
        found[name] = (float(kl), float(same.float().mean()), bool(same.all()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("passages", type=Path)
    parser.add_argument("--kinds", default="year,name,place,yes_no,comparison")
    parser.add_argument("--count", type=int, default=40, help="questions of each kind")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=270, help="stop after")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    passages, form = load_passages(options.passages), PromptForm()
    kinds = options.kinds.split(",")
    questions = make_questions(
        passages, kinds=kinds, count=options.count, documents=options.documents
    )
    in_turn = [q for i in range(options.count) for q in questions[i :: options.count]]
    shown = [form.show(p) for p in passages]
    pool = random.Random(7).sample(shown, min(400, len(shown)))
    caches = Caches(options.model, form, primer_choices(passages, form.show), pool)
    results = defaultdict(list)
    started = time.perf_counter()
    for question in in_turn:
        if time.perf_counter() - started > options.seconds:
            break
        for name, figures in measure(caches, question, options.max_tokens).items():
            results[name].append(figures)
    number = len(results["isolated"])
    print(f"{number} prompts of {options.documents} documents: KL, agreement, same answer")
    rows = {}
    for name, figures in sorted(results.items(), key=lambda item: fmean(f[0] for f in item[1])):
        rows[name] = [round(fmean(column), 4) for column in zip(*figures, strict=True)]
        print(f"{name:32} {rows[name][0]:7.3f} {rows[name][1]:7.1%} {rows[name][2]:7.1%}")
    if options.json:
        content = {"prompts": number, "documents": options.documents, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
