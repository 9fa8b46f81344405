"""The semantics of spans as a float64 computation with transformers: explicit masks and positions.

Each segment is run by itself behind the keys and values that it may see, moved to the positions
at which it sees them. Slow and plain on purpose; every engine is held against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from minipic_backend.spans.segments import Segment, SegmentKind, SegmentTable

KV = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: [1, num_kv_heads, tokens, head_size]


@dataclass
class Reference:
    """A float64 model."""

    model: Any

    @classmethod
    def load(cls, path: str) -> Reference:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        )
        return cls(model.eval())

    @torch.no_grad()
    def logits(self, token_ids: list[int], table: SegmentTable | None) -> torch.Tensor:
        """float64 [num_tokens, vocab]: logits behind every token (spans': behind their frame)."""
        tokens = torch.tensor([token_ids])
        if table is None:
            return self.model(tokens).logits[0]
        parts: list[tuple[torch.Tensor, KV]] = []
        frame_length = table.num_frame_tokens
        for segment in table.segments:
            start, end = segment.start, segment.end
            cached = torch.from_numpy(table.cached_positions(start, end))
            if segment.kind is SegmentKind.DEPENDENT:
                past = self._past(parts, table)
                visible = torch.from_numpy(table.visible(0, start)) & _not_patched(table, segment)
            else:
                behind_frame = segment.kind is SegmentKind.SPAN and frame_length > 0
                past = parts[0][1] if behind_frame else []
                visible = torch.ones(frame_length if behind_frame else 0, dtype=torch.bool)
            parts.append(self._run(tokens[:, start:end], cached, past, visible))
        return torch.cat([logits for logits, _ in parts])

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, past: KV, visible: torch.Tensor
    ) -> tuple[torch.Tensor, KV]:
        """Logits and new keys and values of `tokens`, causal among themselves."""
        count, before = tokens.shape[1], visible.shape[0]
        seen = torch.cat([visible.expand(count, -1), torch.ones(count, count).tril().bool()], dim=1)
        mask = torch.zeros(1, 1, count, before + count, dtype=self.model.dtype)
        mask.masked_fill_(~seen, -torch.inf)
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past):
            cache.update(key, value, layer)
        output = self.model(
            tokens, attention_mask=mask, position_ids=positions[None], past_key_values=cache
        )
        new = [(layer.keys[:, :, before:], layer.values[:, :, before:]) for layer in cache.layers]
        return output.logits[0], new

    def _past(self, parts: list[tuple[torch.Tensor, KV]], table: SegmentTable) -> KV:
        """Keys and values of the segments so far, keys moved to their logical positions."""
        result: KV = []
        for layer in range(len(parts[0][1])):
            keys, values = [], []
            for segment, (_, kv) in zip(table.segments, parts, strict=False):
                key, value = kv[layer]
                keys.append(self._move(key, segment.shift))
                values.append(value)
            result.append((torch.cat(keys, dim=2), torch.cat(values, dim=2)))
        return result

    def _move(self, key: torch.Tensor, shift: int) -> torch.Tensor:
        if shift == 0:
            return key
        # In float64 throughout: angle = shift · inv_freq.
        angles = shift * self.model.model.rotary_emb.inv_freq.double()
        cos, sin = angles.cos(), angles.sin()
        a, b = key.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(key.dtype)


def _not_patched(table: SegmentTable, reader: Segment) -> torch.Tensor:
    """Whether `reader` may see each token in front of it, as far as patches go: bool [start].

    What a patch replaces is gone from the patch on; a patch sees what is logically in front.
    """
    allowed = torch.ones(reader.start, dtype=torch.bool)
    for patch in table.segments:
        if patch.replaced is not None and patch.start <= reader.start:
            allowed[slice(*patch.replaced)] = False
    if reader.replaced is not None:
        positions = torch.from_numpy(table.logical_positions(0, reader.start))
        allowed &= positions < reader.offset
    return allowed
