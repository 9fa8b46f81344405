"""`minipic serve` on a GPU, with graphs: `pytest tests/gpu/test_serve.py -s`, about a minute."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from minipic_backend import RemoteEngine, Result
from minipic_backend.models import ensure_smollm2

sys.path.append(str(Path(__file__).parents[1] / "server"))
from documents import chat, passages
from process import API_KEY, ServerProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ["--api-key", API_KEY, "--max-model-len", "4096", "--max-num-seqs", "16"]
    options += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30)]
    model = str(ensure_smollm2(progress=False))
    made = ServerProcess(model, options, tmp_path_factory.mktemp("server") / "log")
    with made.serving():
        yield made
        made.wait_until_idle()


@pytest.fixture(scope="module")
def remote(server: ServerProcess) -> Iterator[RemoteEngine]:
    with RemoteEngine(server.base_url, api_key=API_KEY, timeout=120) as engine:
        yield engine


Place = tuple[str | int, Mapping[Any, float]]
"""What was chosen there, and log-probabilities of the likeliest tokens."""


def assert_same_choices(cold: list[Place], warm: list[Place]) -> None:
    """Greedy answers to one prompt. Where two tokens are about as likely, bf16 may turn them, and
    what follows is another text; the bound is that of `test_decode_follows_the_reference`."""
    assert len(cold) == len(warm) > 0
    for (before, likely), (after, now) in zip(cold, warm, strict=True):
        common = likely.keys() & now.keys()
        assert {before, after} <= common
        gap = max(abs(likely[token] - now[token]) for token in common)
        print(f"{before!r} {after!r}: {gap:.3f}, between them {now[after] - now[before]:.3f}")
        assert gap < 0.5
        if before != after:
            assert now[after] - now[before] < 0.5
            return


def test_documents_are_reused_in_any_order(remote: RemoteEngine) -> None:
    options = {"max_tokens": 16, "temperature": 0.0, "late": 0}
    documents = list(passages()[:6])
    cold, warm = (remote.generate(chat(documents), **options, logprobs=8) for _ in range(2))
    assert_same_choices(*(_choices(one) for one in (cold, warm)))
    other = remote.generate(chat(documents[::-1], "And what is that?"), **options)
    # All but the text behind the documents.
    assert other.usage.cached_tokens > 0.8 * other.usage.prompt_tokens
    streamed = list(remote.stream(chat(documents[::-1], "And what is that?"), **options))
    assert len(streamed) > 1
    assert "".join(piece.text for piece in streamed) == other.text


def test_documents_in_chats_without_a_client_of_ours(server: ServerProcess) -> None:
    """Marked parts of an OpenAI chat, as any client can send them."""
    parts = [{"type": "text", "text": text, "minipic": {"span": True}} for text in passages()[6:10]]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "In short:"}]}],
        "max_tokens": 8,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 8,
        "minipic": {"late": 0},
    }
    answers = [server.request("POST", "/chat/completions", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    cold, warm = (answer.json() for answer in answers)
    assert_same_choices(*(_places(answer) for answer in (cold, warm)))
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.5 * warm["usage"]["prompt_tokens"]


def _choices(result: Result) -> list[Place]:
    (answer,) = result.completions
    assert answer.logprobs is not None
    return list(zip(answer.token_ids, answer.logprobs, strict=True))


def _places(answer: dict[str, Any]) -> list[Place]:
    return [
        (place["token"], {one["token"]: one["logprob"] for one in place["top_logprobs"]})
        for place in answer["choices"][0]["logprobs"]["content"]
    ]


def test_doctor_finds_nothing_wrong(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "minipic_backend.cli", "doctor"]
    found = subprocess.run(
        [*command, "--base-url", server.base_url, "--api-key", API_KEY],
        capture_output=True,
        text=True,
        check=False,
    )
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr
