"""Block hashes of prompts with spans (design: docs/architecture.md, "Hashing").

    root   = H("minipic", domain, cache_salt)
    prefix : the hashes that vLLM itself gives
    span   : first block H(root, x, "span"); behind the prefix: H(h of the prefix's last block, x)
             inside: H(h_{i-1}, x_i)
    dependent: first block H(g, x, "dep"), g a digest of everything in front of it
             inside: H(h_{i-1}, x_i); generated tokens continue it
    patch  : a dependent segment whose parent also holds which tokens it replaces
    placed : offsets that the options name enter g, or the parent of a dependent segment
    seen_prefix: where less than the prefix is seen, it enters the domain of all dependent segments

g costs O(1) a segment: the hash of a segment's last block fixes all of the segment's tokens, so
that g' = H(g, h_last) fixes the whole prompt up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minipic_backend.config import SpanConfig
from minipic_backend.spans.segments import Segment, SegmentKind, SegmentTable
from minipic_backend.spans.span_hashes import SpanHashes

__all__ = ["HASH_VERSION", "SpanHashChain"]

HASH_VERSION = 1

ExtraKeys = tuple[Any, ...] | None
_DEPENDENT = SegmentKind.DEPENDENT


class SpanHashChain:
    """Hashes of one request's blocks, extended as tokens are generated.

    Args:
        table: the prompt's segments.
        config: block size and key encoding.
        hash_function: vLLM's hash of a picklable object.
        none_hash: what vLLM gives as the parent of a first block.
        cache_salt: the request's salt, or None.
        prompt: the prompt's token ids, [num_prompt_tokens].
        known: hashes of spans and prefixes that earlier requests had.
    """

    def __init__(
        self,
        table: SegmentTable,
        config: SpanConfig,
        hash_function: Callable[[Any], bytes],
        none_hash: bytes,
        cache_salt: str | None,
        prompt: NDArray[np.int64],
        known: SpanHashes,
    ) -> None:
        self._table = table
        self._prompt = prompt
        self._known = known
        self._config = config
        self._hash = hash_function
        self._none_hash = none_hash
        options = table.options
        encoding = (HASH_VERSION, config.key_encoding)
        seen = () if options.seen_prefix is None else (("seen_prefix", options.seen_prefix),)
        self._span_root = self._hash(("minipic", "span", encoding, cache_salt))
        self._dependent_domain = self._hash(
            ("minipic", "dep", encoding, options.offsets, options.see_markers, *seen, cache_salt)
        )
        self._segment_index = 0
        self._digest = none_hash  # g: everything before the current segment
        self._frame_hash = none_hash  # h of the prefix's last block
        self._parent = none_hash  # h of the block before, inside the current segment

    @property
    def table(self) -> SegmentTable:
        """The prompt's segments."""
        return self._table

    def extend(
        self,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        extra_keys: Callable[[int, int, bool], ExtraKeys],
    ) -> list[bytes]:
        """Hashes of the full blocks of `token_ids` behind those already in `hashes`.

        Args:
            hashes: what earlier calls returned, in order.
            token_ids: prompt and generated tokens so far.
            extra_keys: extra keys of the block [start, end) as vLLM would give them: LoRA, and
                where the third argument is True the salt, which vLLM adds to block 0. Only a
                prefix takes it from there: a span must not depend on whether it stands at 0.
        """
        size = self._config.block_size
        start = len(hashes) * size
        if start + size > len(token_ids):
            return []
        segments = self._table.segments
        num_prompt_tokens = self._table.num_prompt_tokens
        lone_span = segments[-1].kind is SegmentKind.SPAN
        # Of every block but the first: LoRA, for whose keys no block differs from another.
        keys = extra_keys(size, 2 * size, False)
        new: list[bytes] = []
        while start + size <= len(token_ids):
            if start == 0:
                self._begin(0)
            elif (
                self._segment_index + 1 < len(segments)
                and start == segments[self._segment_index + 1].start
            ):
                self._advance_digest()
                self._begin(self._segment_index + 1)
            if lone_span and start <= num_prompt_tokens < start + size:
                # A block that holds generated tokens is never part of the span's chain. Where
                # they begin matters: pads and markers of the span are hidden, theirs are not.
                self._advance_digest()
                self._parent = self._hash((self._dependent_parent(), num_prompt_tokens))
            segment = segments[self._segment_index]
            is_prefix = segment.kind is SegmentKind.PREFIX
            first_keys = extra_keys(0, size, is_prefix) if start == 0 else keys
            if start == segment.start and not lone_span and segment.kind is not _DEPENDENT:
                new += self._whole_segment(segment, token_ids, first_keys, keys)
                start = segment.end
                continue
            block = tuple(token_ids[start : start + size])
            self._parent = self._hash((self._parent, block, first_keys))
            new.append(self._parent)
            start += size
        return new

    def _whole_segment(
        self, segment: Segment, token_ids: Sequence[int], first_keys: ExtraKeys, keys: ExtraKeys
    ) -> list[bytes]:
        """Hashes of a span's blocks, or of a prefix's, with the extra keys of the first of them and
        of the others."""
        size = self._config.block_size
        tokens = self._prompt[segment.start : segment.end].tobytes()
        known_as = (self._parent, first_keys, keys, tokens)
        hashes = self._known.get(known_as)
        if hashes is None:
            hashes = []
            parent = self._parent
            for start in range(segment.start, segment.end, size):
                extra = first_keys if start == segment.start else keys
                parent = self._hash((parent, tuple(token_ids[start : start + size]), extra))
                hashes.append(parent)
            self._known.put(known_as, segment.num_tokens, hashes)
        self._parent = hashes[-1]
        return hashes

    def _begin(self, index: int) -> None:
        """Sets the parent of the first block of segment `index`."""
        self._segment_index = index
        segment = self._table.segments[index]
        kind = segment.kind
        if kind is SegmentKind.PREFIX:
            self._parent = self._none_hash
        elif segment.replaced is not None:
            self._parent = self._hash((self._dependent_parent(), segment.replaced))
        elif kind is SegmentKind.DEPENDENT and segment.is_placed:
            self._parent = self._hash((self._dependent_parent(), segment.offset))
        elif kind is SegmentKind.DEPENDENT:
            self._parent = self._dependent_parent()
        elif self._table.num_frame_tokens:
            self._parent = self._frame_hash
        else:
            self._parent = self._span_root

    def _advance_digest(self) -> None:
        """Takes the segment that just ended into g."""
        if self._segment_index == 0:
            self._frame_hash = self._parent
        segment = self._table.segments[self._segment_index]
        own = (segment.offset,) if segment.is_placed else ()
        self._digest = self._hash((self._digest, self._parent, *own))

    def _dependent_parent(self) -> bytes:
        return self._hash((self._dependent_domain, self._digest))
