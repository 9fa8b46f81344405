"""What only real connections show: that they are kept, and which way they go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_vllm import FakeVLLM

from minipic_backend import RemoteEngine, ServerUnreachableError

NOWHERE = "http://127.0.0.1:9"  # the port "discard": nobody listens


class Listener(ThreadingHTTPServer):
    """A `FakeVLLM` on a port of this machine; as a proxy too, which gets whole addresses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = FakeVLLM()
        self.num_connections = 0
        self.targets: list[str] = []

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener

    def setup(self) -> None:
        self.server.num_connections += 1
        super().setup()

    def do_GET(self) -> None:
        self.server.targets.append(self.path)
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        url = httpx.URL(self.server.root).join(self.path)
        request = httpx.Request(self.command, url, content=content)

        async def answer() -> tuple[int, bytes]:
            response = await self.server.fake.handle_async_request(request)
            return response.status_code, await response.aread()

        status, body = asyncio.run(answer())
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setenv("MINIPIC_CACHE", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with Listener() as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield listener
        listener.shutdown()
        thread.join()


def test_one_connection_serves_one_request_after_another(listener: Listener) -> None:
    """From any thread and event loop: they share the connections."""
    with RemoteEngine(f"{listener.root}/v1") as engine:
        for _ in range(3):
            engine.generate("Hello")
            asyncio.run(engine.agenerate("Hello"))
        assert list(engine.stream("Hello"))
    assert len(listener.targets) == 9  # two of them ask what the server is
    assert listener.num_connections == 1


def test_a_proxy_of_the_environment(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", listener.root)
    with RemoteEngine("http://server.test/v1") as engine:
        engine.generate("Hello")
    assert listener.targets[-1] == "http://server.test/v1/completions"
    monkeypatch.setenv("NO_PROXY", "server.test")
    seen = len(listener.targets)
    with (
        RemoteEngine("http://server.test/v1", max_retries=0) as engine,
        pytest.raises(ServerUnreachableError),
    ):
        engine.generate("Hello")
    assert len(listener.targets) == seen


def test_no_proxy_stands_in_front_of_this_machine(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", NOWHERE)
    monkeypatch.setenv("ALL_PROXY", NOWHERE)
    for host in ("127.0.0.1", "localhost"):
        with RemoteEngine(f"http://{host}:{listener.server_port}/v1") as engine:
            engine.generate("Hello")
    assert listener.targets[-1] == "/v1/completions"
