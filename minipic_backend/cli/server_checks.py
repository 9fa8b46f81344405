"""What `minipic doctor --base-url` looks at, from the first connection to an answer that reuses a
document."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from minipic_backend.cli.checks import Finding
from minipic_backend.errors import (
    ConfigurationError,
    MiniPICError,
    PluginMissingError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from minipic_backend.prompt import Prompt, Span, Text
from minipic_backend.results import Result

__all__ = ["check_server"]

_DOCUMENT = (
    "The lighthouse of Kell was built of grey stone. It has nine rooms, a spiral stair of two "
    "hundred steps, and a lamp that is seen from thirty miles away. "
) * 4


def check_server(base_url: str, model: str | None, api_key: str | None) -> Iterator[Finding]:
    """Connection, plugin, versions, tokenizer, an answer, reuse, separation by salt, a stream."""
    from minipic_backend import __version__
    from minipic_backend.remote import RemoteEngine

    try:
        engine = RemoteEngine(
            base_url, model=model, api_key=api_key, timeout=120.0, on_missing_plugin="error"
        )
    except ConfigurationError as error:
        yield Finding("FAIL", str(error), _advice(error))
        return
    with engine:
        try:
            capability = engine.capability
            assert capability is not None  # on_missing_plugin is "error"
        except MiniPICError as error:
            yield Finding("FAIL", str(error), _advice(error))
            return
        yield Finding(
            "ok",
            f"{base_url}: MiniPIC {capability.minipic_version}, vLLM {capability.vllm_version}, "
            f"{engine.model}, context of {engine.max_model_len} tokens, blocks of "
            f"{engine.block_size}",
        )
        if capability.minipic_version != __version__:
            yield Finding(
                "warn",
                f"this client is {__version__}",
                "install the same version on both sides",
            )
        yield Finding("ok", "the tokenizer here is the server's, to the token")
        if not capability.reports_cached_tokens:
            yield Finding(
                "warn",
                "the server does not report cached tokens",
                "start it by `minipic serve`, or with --enable-prompt-tokens-details",
            )
        try:
            yield from _check_answers(engine)
        except MiniPICError as error:
            yield Finding("FAIL", f"a request failed: {error}", _advice(error))


def _check_answers(engine: Any) -> Iterator[Finding]:
    salt, other_salt = secrets.token_hex(16), secrets.token_hex(16)
    cold = _ask(engine, salt, "What is it built of?")
    yield Finding(
        "ok",
        f"an answer: {cold.usage.prompt_tokens} tokens, the first after {cold.timing.ttft_s:.2f} s",
    )
    if cold.usage.cached_tokens is None:
        return
    warm = _ask(engine, salt, "How many rooms are there?")
    if warm.usage.cached_tokens:
        yield Finding(
            "ok",
            f"another question on the same document: {warm.usage.cached_tokens} tokens read from "
            f"the cache, the first after {warm.timing.ttft_s:.2f} s",
        )
    else:
        yield Finding(
            "FAIL",
            "the document was not reused",
            "is the KV cache too small for one prompt? raise --kv-cache-gib, or "
            "--gpu-memory-utilization",
        )
    other = _ask(engine, other_salt, "How many rooms are there?")
    if other.usage.cached_tokens:
        yield Finding(
            "FAIL",
            f"{other.usage.cached_tokens} tokens were shared between two cache_salts",
            "do not serve several tenants with this server, and report it",
        )
    else:
        yield Finding("ok", "another cache_salt shares nothing with it")
    started = time.perf_counter()
    pieces = list(engine.stream(_prompt("Who lives there?"), max_tokens=8, cache_salt=salt))
    seconds = time.perf_counter() - started
    yield Finding("ok", f"a stream: {len(pieces)} pieces in {seconds:.2f} s")


def _ask(engine: Any, salt: str, question: str) -> Result:
    found: Result = engine.generate(
        _prompt(question), max_tokens=4, temperature=0.0, late=0, cache_salt=salt
    )
    return found


def _prompt(question: str) -> Prompt:
    return Prompt([Text("Answer from the document.\n"), Span(_DOCUMENT), Text(question)])


def _advice(error: MiniPICError) -> str:
    if isinstance(error, PluginMissingError):
        return "minipic serve MODEL"
    if isinstance(error, ServerTimeoutError):
        return "is the server overloaded, or still starting?"
    if isinstance(error, ServerUnreachableError):
        return "start the server, or mend the address; behind a proxy, look at HTTP_PROXY, NO_PROXY"
    if isinstance(error, ConfigurationError):
        return "mend what the message names: --api-key, --model, the address"
    return "look at the server's log"
