"""A server that dies, and requests that are given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from documents import chat, fresh
from process import API_KEY, ServerProcess

from minipic_backend import (
    ConfigurationError,
    RemoteEngine,
    RequestAbortedError,
    ServerUnreachableError,
)

LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0.0}


def assert_free_within_a_second(server: ServerProcess, give_up: Callable[[], None]) -> None:
    """A busy machine may take longer, but not each of three times; the answers would take many
    seconds."""
    taken = []
    for _ in range(3):
        give_up()
        started = time.monotonic()
        server.wait_until_idle()
        taken.append(time.monotonic() - started)
        if taken[-1] < 1.0:
            return
    pytest.fail(f"Free after {taken} s")


@pytest.mark.parametrize("how", ["leave", "abort"])
def test_giving_up_frees_the_server_within_a_second(
    server: ServerProcess, remote: RemoteEngine, how: str
) -> None:
    def give_up() -> None:
        stream = remote.stream(chat(fresh(2)), request_id="given-up", **LONG)
        next(stream)
        assert not server.is_idle()
        if how == "leave":
            stream.close()
        else:
            remote.abort("given-up")
            with pytest.raises(RequestAbortedError):
                list(stream)

    assert_free_within_a_second(server, give_up)


def test_a_thread_that_waits_for_a_whole_answer_can_be_aborted(
    server: ServerProcess, remote: RemoteEngine
) -> None:
    def give_up() -> None:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                remote.generate(chat(fresh(1)), request_id="waiting", **LONG)
            except RequestAbortedError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while server.is_idle():
            time.sleep(0.02)
        remote.abort("waiting")
        thread.join(timeout=30)
        assert len(failed) == 1

    assert_free_within_a_second(server, give_up)


def test_the_wrong_key(server: ServerProcess) -> None:
    with (
        RemoteEngine(server.base_url, api_key="wrong") as engine,
        pytest.raises(ConfigurationError, match="api_key"),
    ):
        engine.generate("Hello")


def test_killed_in_the_middle_of_a_stream(server: ServerProcess) -> None:
    """A clear error within the client's timeout; the same client works after a restart."""
    with RemoteEngine(server.base_url, api_key=API_KEY, timeout=20, max_retries=1) as engine:
        stream = engine.stream(chat(fresh(2)), **LONG)
        assert next(stream).token_ids
        server.kill()
        started = time.monotonic()
        with pytest.raises(ServerUnreachableError, match="lost before the answer ended"):
            list(stream)
        with pytest.raises(ServerUnreachableError, match="No server answers"):
            engine.generate("Hello")
        assert time.monotonic() - started < 20
        server.start()
        answer = engine.generate(chat(fresh(2)), max_tokens=3, temperature=0.0)
        assert answer.usage.completion_tokens == 3
