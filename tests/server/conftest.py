"""One real server, an embedded engine beside it, and clients of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from process import API_KEY, ServerProcess

from minipic_backend import Engine, RemoteEngine
from minipic_backend.models import HUB_NAME, ensure_smollm2

MAX_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    ensure_smollm2(progress=False)
    options = ["--api-key", API_KEY, "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32"]
    options += ["--kv-cache-gib", "0.5", "--max-logprobs", "20", "--enable-scale-out"]
    server = ServerProcess(
        HUB_NAME,
        options,
        tmp_path_factory.mktemp("server") / "log",
        # So that memory tells of leaks (`test_soak`): oneDNN keeps a compiled product for each
        # number of rows, the allocator what tensors gave back; 25 to 45 MiB a minute at first.
        environment={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_MMAP_THRESHOLD_": "262144"},
    )
    with server.serving():
        yield server


@pytest.fixture(scope="session")
def remote(server: ServerProcess) -> Iterator[RemoteEngine]:
    with RemoteEngine(server.base_url, api_key=API_KEY, timeout=120) as engine:
        yield engine


@pytest.fixture(scope="session")
def embedded() -> Iterator[Engine]:
    with Engine(
        HUB_NAME, dtype="float32", max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.25, max_logprobs=20
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the server is up and idle, with every block free."""
    yield
    if "server" in request.fixturenames:
        found: Any = request.getfixturevalue("server")
        found.wait_until_idle()
