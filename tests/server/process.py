"""`minipic serve` as a process of its own, on a port of this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

__all__ = ["API_KEY", "ServerProcess"]

API_KEY = "a-key-of-the-tests"
_START_S = 240.0


class ServerProcess:
    """A server that can be killed and started again on the same port.

    Args:
        model: what to serve.
        options: of `minipic serve`, further ones.
        log: file that its output goes to.
        command: instead of `minipic serve`.
        environment: further variables.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str],
        log: Path,
        *,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {"VLLM_LOGGING_LEVEL": "WARNING", **(environment or {})}
        self.port = _free_port()
        self.log = log
        self.command = [
            *(command or [sys.executable, "-m", "minipic_backend.cli", "serve", model]),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        # One for all requests: a new one costs 25 ms, most tests ask several times. Connections are
        # dropped before the server drops them.
        self._client = httpx.Client(limits=httpx.Limits(keepalive_expiry=2.0), timeout=120)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"

    def start(self) -> None:
        """Returns once the server answers."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        deadline = time.monotonic() + _START_S
        while not self.healthy():
            assert self.running, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.25)

    @contextmanager
    def serving(self) -> Iterator[ServerProcess]:
        """Started, and ended as an operator ends it, which must be in an orderly way."""
        try:
            self.start()
            yield self
            assert self.stop() == 0, "SIGTERM ends the server in an orderly way"
        finally:
            if self.running:
                self.kill()

    def kill(self) -> None:
        """SIGKILL, to the server and its engine alike, as when a machine goes down."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM, as an operator stops it; its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(timeout=60)
        finally:
            if self._process.poll() is None:
                self.kill()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        try:
            return self._client.get(f"{self.root}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request with the key, past any client of ours."""
        headers = {"authorization": f"Bearer {API_KEY}", **options.pop("headers", {})}
        return self._client.request(method, self.base_url + path, headers=headers, **options)

    def metrics(self, *names: str) -> list[float]:
        """Of each metric the sum of its series."""
        text = self._client.get(f"{self.root}/metrics", timeout=30).text
        sums = []
        for name in names:
            pattern = rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$"
            found = re.findall(pattern, text, re.MULTILINE)
            assert found, name
            sums.append(sum(map(float, found)))
        return sums

    def is_idle(self) -> bool:
        """No request runs or waits, and no block is held for one."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metrics(*(f"vllm:{name}" for name in names)))

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_idle():
            assert time.monotonic() < deadline, "requests or blocks are left"
            time.sleep(0.02)

    def resident_bytes(self) -> int:
        """Memory of the server and its engine."""
        assert self._process is not None
        total = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            if int(fields[2]) == self._process.pid:  # the process group
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        assert total > 0
        return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
