"""What only real connections show: that they are kept, and which way they go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_vllm import FakeVLLM

from minipic_backend import RemoteEngine, ServerUnreachableError
from minipic_backend.remote import transport

NOWHERE = "http://127.0.0.1:9"  # the port "discard": nobody listens


class Listener(ThreadingHTTPServer):
    """A `FakeVLLM` on a port of this machine; as a proxy too, which gets whole addresses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = FakeVLLM()
        self.num_connections = 0
        self.targets: list[str] = []
        self.behind_the_end: bytes | None = None
        """An answer's body never ends, and brings these bytes time and again."""
        self.dropped = threading.Event()

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
        if self.server.behind_the_end is not None and self.command == "POST":
            self._never_end(body)
            return
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def _never_end(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.connection.settimeout(0.05)
        while True:
            try:
                if not self.connection.recv(1):
                    break
            except TimeoutError:
                if more := self.server.behind_the_end:
                    with suppress(OSError):
                        self.connection.sendall(b"%x\r\n%s\r\n" % (len(more), more))
            except OSError:
                break
        self.close_connection = True
        self.server.dropped.set()

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


@pytest.mark.parametrize("behind", [b"", b": still here\n\n"], ids=["silence", "comments"])
def test_an_answer_whose_body_never_ends(
    listener: Listener, behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole all the same, and its connection is given up, whatever the `timeout` is."""
    monkeypatch.setattr(transport, "_END_S", 0.3)
    with RemoteEngine(f"{listener.root}/v1", timeout=None) as engine:
        engine.count_tokens("x")
        listener.behind_the_end = behind
        begun = time.monotonic()
        text = engine.generate("Hello", request_id="mine").text
        assert listener.dropped.wait(10.0)
        assert time.monotonic() - begun > 0.25
        listener.behind_the_end = None
        assert engine.generate("Hello", request_id="mine").text == text


def test_closing_while_a_body_does_not_end(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_END_S", 60.0)
    with RemoteEngine(f"{listener.root}/v1", timeout=None) as engine:
        engine.count_tokens("x")
        listener.behind_the_end = b""
        assert engine.generate("Hello").text
        begun = time.monotonic()
    assert listener.dropped.wait(10.0)
    assert time.monotonic() - begun < 10.0
