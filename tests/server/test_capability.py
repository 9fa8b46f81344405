"""What the server says about itself, as any client may ask it."""

from __future__ import annotations

from typing import get_args

import pytest
from process import ServerProcess

from minipic_backend import RemoteEngine, __version__
from minipic_backend.config import Frame, KeyEncoding, Offsets, Technique
from minipic_backend.models import HUB_NAME


def test_capabilities(server: ServerProcess, remote: RemoteEngine) -> None:
    vllm = pytest.importorskip("vllm")
    found = server.request("GET", "/minipic").json()
    assert found["minipic_version"] == __version__
    assert found["vllm_version"] == vllm.__version__
    assert found["models"] == [HUB_NAME]
    assert found["max_model_len"] == remote.max_model_len == 2048
    assert found["reports_cached_tokens"] is True
    config = found["config"]
    assert config["block_size"] == 32
    assert config["key_encoding"] == "span_local"
    names = [remote.tokenizer.convert_ids_to_tokens(config[n]) for n in ("ssep", "pdep", "pad")]
    assert len(set(names)) == 3
    assert set(names) <= set(remote.layout.encoder.special_texts)
    for name, known in (
        ("techniques", Technique), ("frames", Frame), ("offsets", Offsets),
        ("key_encodings", KeyEncoding),
    ):  # fmt: skip
        assert tuple(found[name]) == get_args(known)
    tokenizer = server.request("GET", "/minipic/tokenizer").json()
    assert tokenizer["digest"] == found["tokenizer_digest"]
    assert "tokenizer.json" in tokenizer["files"]


def test_health_and_metrics_are_vllms(server: ServerProcess) -> None:
    assert server.healthy()
    (before,) = server.metrics("vllm:request_success_total")
    body = {"model": HUB_NAME, "prompt": "Hello", "max_tokens": 1}
    assert server.request("POST", "/completions", json=body).status_code == 200
    assert server.metrics("vllm:request_success_total") == [before + 1]
