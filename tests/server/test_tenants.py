"""Tenants, told apart by `cache_salt`: none sees what another has cached."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from documents import chat, fresh
from process import API_KEY, ServerProcess

from minipic_backend import RemoteEngine
from minipic_backend.models import HUB_NAME

SALTS = [None, "tenant-a", "tenant-b"]
OPTIONS = {"max_tokens": 2, "temperature": 0.0, "late": 0}


@pytest.mark.parametrize(("first", "second"), list(permutations(SALTS, 2)))
@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_spans_of_different_salts_never_hit(
    remote: RemoteEngine, first: str | None, second: str | None, frame: str
) -> None:
    prompt = chat(fresh(2))
    options = {**OPTIONS, "frame": frame}
    cold = remote.generate(prompt, cache_salt=first, **options)
    again = remote.generate(prompt, cache_salt=first, **options)
    other = remote.generate(prompt, cache_salt=second, **options)
    documents = sum(row.num_tokens for row in remote.explain(prompt, **options).rows[1:-1])
    assert again.usage.cached_tokens >= documents
    # Nothing but a prefix that the tenant's own earlier prompts have left.
    prefix = remote.explain(prompt, **options).rows[0].num_tokens
    assert other.usage.cached_tokens <= prefix
    assert other.usage.cached_tokens + other.usage.cache_creation_tokens == (
        cold.usage.cached_tokens + cold.usage.cache_creation_tokens
    )
    assert other.token_ids == again.token_ids == cold.token_ids


def test_the_salt_of_a_client(server: ServerProcess) -> None:
    prompt = chat(fresh(2))
    options: dict[str, Any] = {"api_key": API_KEY}
    with (
        RemoteEngine(server.base_url, cache_salt="mine", **options) as mine,
        RemoteEngine(server.base_url, cache_salt="yours", **options) as yours,
        RemoteEngine(server.base_url, **options) as nobodys,
    ):
        prefix = mine.explain(prompt, late=0).rows[0].num_tokens
        mine.warm([span.text for span in prompt.spans], prompt=prompt)
        assert mine.generate(prompt, **OPTIONS).usage.cached_tokens > prefix
        for stranger in (yours, nobodys):
            assert stranger.generate(prompt, **OPTIONS).usage.cached_tokens <= prefix
        hit = nobodys.generate(prompt, cache_salt="mine", **OPTIONS).usage
        assert hit.cached_tokens > prefix


def test_the_salt_of_an_anthropic_request(server: ServerProcess) -> None:
    source = {"type": "text", "data": fresh(1)[0]}
    content = [{"type": "document", "source": source}, {"type": "text", "text": "What is it?"}]

    def read(salt: str) -> int:
        messages = [{"role": "user", "content": content}]
        body = {"model": HUB_NAME, "max_tokens": 1, "messages": messages, "cache_salt": salt}
        found = server.request("POST", "/messages", json=body).json()["usage"]
        return int(found["cache_read_input_tokens"])

    read("c")
    document = read("c") - read("d")
    assert document >= 64
    assert read("d") >= document  # its own, by now


def test_timing_tells_nothing_of_another_tenant(remote: RemoteEngine) -> None:
    """A document that another one has in the cache takes as long as one that nobody has."""
    prompt = chat([" ".join(fresh(10))])

    def seconds(salt: str) -> float:
        return remote.generate(prompt, cache_salt=salt, **OPTIONS).timing.ttft_s

    seconds("e")
    warm = min(seconds("e") for _ in range(3))
    assert seconds("f") > 2 * warm


def test_nobody_can_look_into_the_cache(remote: RemoteEngine) -> None:
    """`explain` tells of cached segments in process; on a server it would tell of others'."""
    assert all(row.cached_tokens is None for row in remote.explain(chat(fresh(1))).rows)
