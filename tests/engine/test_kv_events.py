"""KV cache events: what a router needs to know where a document is cached.

Each event is held against vLLM's own hash function: the hash of a block that follows the event's
parent and holds the event's tokens must be the hash that the event names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from step_rig import BLOCK_SIZE, PAD, StepRig, dependent, prefix, prompt, span

from minipic_backend.config import SpanOptions


class EventRig(StepRig):
    """A scheduler that publishes events, and keeps them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from vllm.config import KVEventsConfig

        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        super().__init__(folder, kv_events_config=events, **settings)
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)

    def stored(self) -> list[Any]:
        """The `BlockStored` events since the last call."""
        from vllm.distributed.kv_events import BlockStored

        events = [event for event in self.events if isinstance(event, BlockStored)]
        self.events.clear()
        return events

    def name(self, block_hash: bytes) -> Any:
        """As events name a block."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        return maybe_convert_block_hash(block_hash)  # type: ignore[arg-type]

    def names(self, token_ids: list[int]) -> list[Any]:
        return [self.name(block_hash) for block_hash in self.hashes(token_ids)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[EventRig]:
    rig = EventRig(tmp_path)
    yield rig
    rig.finish()
    rig.assert_idle()


def assert_follow(rig: EventRig, event: Any, hashes: dict[Any, bytes]) -> None:
    """Every block of the event is what vLLM's hash of its parent and its tokens says."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    parent = None if event.parent_block_hash is None else hashes[event.parent_block_hash]
    assert len(event.token_ids) == len(event.block_hashes) * BLOCK_SIZE
    for index, name in enumerate(event.block_hashes):
        tokens = event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        parent = hash_block_tokens(sha256, parent, tokens)  # type: ignore[arg-type]
        assert rig.name(parent) == name
        hashes[name] = parent


def test_a_cold_prompt_in_place(rig: EventRig) -> None:
    rig.run(prompt(1, 2))
    whole = rig.names(prompt(1, 2))
    events = rig.stored()
    assert [event.block_hashes for event in events] == [
        whole[:2],
        whole[2:5],
        whole[5:8],
        whole[8:],
    ]
    assert [event.parent_block_hash for event in events] == [None, whole[1], whole[1], None]
    hashes: dict[Any, bytes] = {}
    for event in events[:3]:
        assert_follow(rig, event, hashes)
    assert events[3].token_ids == dependent()[:BLOCK_SIZE]


def test_jobs_tell_of_their_document_behind_its_prefix(rig: EventRig) -> None:
    rig.run(prompt(1))
    hashes: dict[Any, bytes] = {}
    for event in rig.stored()[:2]:
        assert_follow(rig, event, hashes)
    rig.run(prompt(9, 1))
    events = rig.stored()
    new = [event for event in events if event.parent_block_hash is not None]
    assert next(event.block_hashes for event in new) == rig.names(prompt(9))[2:4]
    for event in new:  # the last block, with the pads that were not computed, in one of its own
        assert_follow(rig, event, hashes)
    assert [token for event in new for token in event.token_ids] == span(9)
    assert span(9)[-1] == PAD


def test_a_text_behind_the_prefix_follows_nothing_even_as_a_job(rig: EventRig) -> None:
    text = dependent(8, 2 * BLOCK_SIZE - 1)
    text += [PAD]
    rig.run(prompt(1))
    rig.stored()
    whole = [*prefix(), *text, *span(1), *dependent()]
    rig.run(whole)
    events = rig.stored()
    first = len(prefix()) // BLOCK_SIZE
    names = rig.names(whole)
    assert [name for event in events for name in event.block_hashes] == [
        *names[first : first + 2],
        names[-1],
    ]
    parents = {event.block_hashes[0]: event.parent_block_hash for event in events}
    assert parents[names[first]] is None
    assert parents.get(names[first + 1], names[first]) == names[first]
    assert [token for event in events[:-1] for token in event.token_ids] == text


def test_a_document_is_told_of_once_and_found_wherever_it_stands(rig: EventRig) -> None:
    rig.run(prompt(1, 2))
    rig.stored()
    rig.run(prompt(2, 1, question=1))
    assert [event.token_ids for event in rig.stored()] == [dependent(1)[:BLOCK_SIZE]]


def test_with_frame_none_a_document_follows_nothing(rig: EventRig) -> None:
    rig.run(prompt(1, 2), SpanOptions("none"))
    events = rig.stored()
    assert [event.parent_block_hash for event in events] == [None] * 4
    assert [len(event.block_hashes) for event in events] == [2, 3, 3, 1]


def test_chunks_and_generated_tokens_go_on_where_their_segment_was(tmp_path: Path) -> None:
    rig = EventRig(tmp_path, max_num_batched_tokens=64)  # ends inside of the first document
    served = rig.add(prompt(1, 2), num_tokens=30)
    rig.finish()
    events = rig.stored()
    whole = rig.names(prompt(1, 2))
    assert [event.block_hashes for event in events][:3] == [whole[:2], whole[2:4], whole[4:5]]
    assert [event.parent_block_hash for event in events][:3] == [None, whole[1], whole[3]]
    generated = [*dependent()[BLOCK_SIZE:], *served.tokens]
    assert events[-1].parent_block_hash == events[-2].block_hashes[-1]
    assert events[-2].token_ids == generated[:BLOCK_SIZE]
    assert events[-1].token_ids == generated[BLOCK_SIZE : 2 * BLOCK_SIZE]


def test_an_ordinary_prompt_has_vllms_own_events(rig: EventRig) -> None:
    rig.run(prefix(num_blocks=3))
    (event,) = rig.stored()
    assert event.parent_block_hash is None
    assert event.token_ids == prefix(num_blocks=3)
    assert_follow(rig, event, {})
