"""vLLM's own server, without the plugin switched on."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from documents import chat, passages
from process import ServerProcess

from minipic_backend import Engine, PluginMissingError, RemoteEngine
from minipic_backend.models import HUB_NAME, ensure_smollm2


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = str(ensure_smollm2(progress=False))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    options = ["--served-model-name", HUB_NAME, "--max-model-len", "2048", "--dtype", "float32"]
    server = ServerProcess(
        folder,
        [*options, "--enforce-eager"],
        tmp_path_factory.mktemp("stock") / "log",
        command=command,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    try:
        server.start()
        yield server
    finally:
        if server.running:
            server.stop()


def test_is_told_apart(stock: ServerProcess) -> None:
    with (
        RemoteEngine(stock.base_url) as engine,
        pytest.raises(PluginMissingError, match="minipic serve"),
    ):
        engine.generate("Hello")


def test_ordinary_prompts_where_that_is_wanted(stock: ServerProcess, embedded: Engine) -> None:
    """Exact attention, as the embedded engine's technique "full"; usage says what it does not."""
    prompt = chat(list(passages()[:3]))
    want = embedded.generate(prompt, technique="full", max_tokens=16, temperature=0.0)
    with RemoteEngine(stock.base_url, model=HUB_NAME, on_missing_plugin="plain") as engine:
        with pytest.warns(UserWarning, match="does not report cached tokens"):
            got = engine.generate(prompt, max_tokens=16, temperature=0.0)
        assert engine.capability is None
    assert got.token_ids == want.token_ids
    assert got.usage.prompt_tokens == want.usage.prompt_tokens
    assert got.usage.cached_tokens is None
