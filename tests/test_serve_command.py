"""`minipic serve` before a server is there, and `minipic doctor --base-url` against a fake one."""

from __future__ import annotations

import importlib.metadata
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_vllm import MODEL, FakeVLLM

import minipic_backend.remote as remote_package
from minipic_backend import ConfigurationError, RemoteEngine
from minipic_backend.cli import main
from minipic_backend.cli.serve import plugin_names, serve
from minipic_backend.models import HUB_NAME
from minipic_backend.server.plugin import EndpointPlugin


def entries(*pairs: tuple[str, str]) -> importlib.metadata.EntryPoints:
    return importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, "module:thing", f"vllm.{group}_plugins")
        for group, name in pairs
    )


@pytest.mark.parametrize(
    ("chosen", "names"),
    [("other", ["other", "minipic"]), ("minipic,other", ["minipic", "other"]), ("", ["minipic"])],
)
def test_plugins_that_the_user_named_stay(chosen: str, names: list[str]) -> None:
    assert plugin_names(chosen) == names


def test_no_other_plugin_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = entries(
        ("general", "minipic"), ("endpoint", "minipic"), ("general", "loras"), ("platform", "tpu"),
        ("stat_logger", "stats"), ("io_processor", "geo"), ("endpoint", "routes"),
    )  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: found)
    assert sorted(plugin_names(None)) == ["geo", "loras", "minipic", "stats", "tpu"]
    assert capsys.readouterr().err == ""


def test_routes_that_come_along_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = entries(("general", "minipic"), ("general", "both"), ("endpoint", "both"))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: found)
    assert plugin_names(None) == ["minipic", "both"]
    assert "routes of both" in capsys.readouterr().err


def test_layout_options_are_checked_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigurationError, match="late"):
        serve(["model", "--late", "-1"])
    assert main(["serve", "model", "--late", "-1"]) == 2
    assert "minipic serve: late" in capsys.readouterr().err


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `minipic serve` up to where vLLM would start; gives the arguments that it got."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.cli.serve import ServeSubcommand

    for name in ("VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD"):  # set by it: to be restored
        monkeypatch.setenv(name, "spawn")
    seen: list[Any] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(seen.append))

    def run(*arguments: str) -> Any:
        assert main(["serve", *arguments]) == 0
        return seen.pop()

    return run


def test_arguments_that_vllm_gets(served: Any) -> None:
    args = served(
        HUB_NAME, "--port", "1234", "--late", "2", "--key-encoding", "unrotated",
        "--kv-cache-gib", "0.5", "--max-model-len", "1024", "--api-key", "k",
    )  # fmt: skip
    assert (args.port, args.max_model_len, args.api_key) == (1234, 1024, ["k"])
    assert args.additional_config == {"minipic": {"key_encoding": "unrotated"}}
    assert args.kv_cache_memory_bytes == 2**29
    assert args.enable_prompt_tokens_details is True
    # Found without a hub, and served under the name that was given.
    assert Path(args.model).is_dir()
    assert args.served_model_name == [HUB_NAME]
    assert (args.minipic_layout["late"], args.minipic_layout["technique"]) == (2, "primed")
    assert os.environ["VLLM_PLUGINS"] == "spawn,minipic"


def test_what_the_user_says_wins(served: Any) -> None:
    own = {"minipic": {"key_encoding": "unrotated"}, "other": 1}
    args = served(
        HUB_NAME, "--additional-config", json.dumps(own), "--no-enforce-eager",
        "--served-model-name", "a", "b", "--kv-cache-memory-bytes", "1000000",
        "--markers", "<a>", "<b>", "<c>",
    )  # fmt: skip
    assert args.additional_config["other"] == 1
    assert args.additional_config["minipic"] == {
        "key_encoding": "unrotated",
        "markers": ["<a>", "<b>", "<c>"],
    }
    assert args.enforce_eager is False
    assert args.served_model_name == ["a", "b"]
    assert args.kv_cache_memory_bytes == 1_000_000


def test_no_such_model(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_on_a_server_without_spans_the_plugin_does_nothing() -> None:
    app: Any = Namespace(state=Namespace(args=Namespace(additional_config={})))
    EndpointPlugin().attach_router(app)  # no include_router here: it would fail


async def test_nor_does_its_state() -> None:
    state = Namespace()
    await EndpointPlugin().init_state(object(), state, Namespace(additional_config={}))
    await EndpointPlugin().init_state(None, state, Namespace(additional_config={"minipic": {}}))
    assert vars(state) == {}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `minipic doctor --base-url` against a fake server."""
    monkeypatch.setenv("MINIPIC_CACHE", str(tmp_path))

    def run(server: httpx.AsyncBaseTransport, *options: str) -> int:
        monkeypatch.setattr(
            remote_package,
            "RemoteEngine",
            lambda base_url, **given: RemoteEngine(
                base_url, http=server, **{**given, "max_retries": 0}
            ),
        )
        return main(["doctor", "--base-url", "http://server.test/v1", *options])

    return run


def test_doctor_finds_a_good_server_good_but_for_what_a_fake_cannot_do(
    doctor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake reports 16 cached tokens always, so that salts seem to leak."""
    assert doctor(FakeVLLM(), "--model", MODEL) == 1
    shown = capsys.readouterr().out
    assert "MiniPIC 0.1.0, vLLM 0.32.0, a-model" in shown
    assert "16 tokens read from the cache" in shown
    assert "FAIL  16 tokens were shared between two cache_salts" in shown
    assert "a stream: 2 pieces" in shown


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        (FakeVLLM(plugin=False), (), "minipic serve MODEL"),
        (FakeVLLM(), ("--model", "another"), "serves a-model, not another"),
        (FakeVLLM(script=[httpx.Response(500, json={})]), (), "a request failed"),
        (
            httpx.MockTransport(lambda request: httpx.Response(401, json={"error": "no"})),
            (),
            "api_key",
        ),
    ],
    ids=["stock", "model", "broken", "key"],
)
def test_doctor_says_what_to_do(
    doctor: Any, server: Any, options: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(server, *options) == 1
    assert words in capsys.readouterr().out


def test_doctor_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--base-url", "server.test"]) == 1
    assert "http://host:8000/v1" in capsys.readouterr().out
