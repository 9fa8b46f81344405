"""A vLLM server in a few lines, in front of which a `RemoteEngine` can be put without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from tiny_tokenizers import LLAMA_SPECIALS, LLAMA_TEMPLATE, byte_level

from minipic_backend.capability import Capability
from minipic_backend.config import SpanConfig
from minipic_backend.layout.markers import choose_markers
from minipic_backend.layout.tokenizer_digest import tokenizer_digest

MODEL = "a-model"


def make_tokenizer(template: str = LLAMA_TEMPLATE) -> Any:
    return byte_level(LLAMA_SPECIALS, template, bos=None)


def event(text: str, token: int | None, **choice: Any) -> str:
    """A streamed piece of an answer, as vLLM writes it."""
    ids = [] if token is None else [token]
    body = {"choices": [{"index": 0, "text": text, "token_ids": ids, **choice}]}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def usage(**details: Any) -> str:
    body = {"choices": [], "usage": {"prompt_tokens": 1, **details}}
    return f"data: {json.dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"
ANSWER = [
    event("Teut", 5),
    event("berga", 6, finish_reason="stop", stop_reason=None),
    usage(prompt_tokens_details={"cached_tokens": 16}),
    DONE,
]

Step = str | Exception | float
"""What a stream does next: send, fail, or wait so many seconds."""


@dataclass
class FakeVLLM(httpx.AsyncBaseTransport):
    """Answers with `script`; each request takes the next entry, the last one stays.

    An entry is an exception (no connection), a response, or the steps of a stream.
    """

    script: list[Exception | httpx.Response | Sequence[Step]] = field(
        default_factory=lambda: [ANSWER]
    )
    plugin: bool = True
    tokenizer: Any = field(default_factory=make_tokenizer)
    capability: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    closed_streams: int = 0

    def __post_init__(self) -> None:
        chosen = choose_markers(self.tokenizer)
        config = SpanConfig(chosen.ssep, chosen.pdep, chosen.pad, block_size=16)
        found = Capability(
            "0.1.0", "0.32.0", (MODEL,), 2048, config, tokenizer_digest(self.tokenizer),
            reports_cached_tokens=True,
        )  # fmt: skip
        self.capability = {**found.to_dict(), **self.capability}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.paths.append(path)
        self.headers.append(request.headers)
        if path == "/v1/completions":
            await request.aread()
            self.requests.append(json.loads(request.content))
            return self._answer(self.script.pop(0) if len(self.script) > 1 else self.script[0])
        routes: dict[str, Callable[[], Any]] = {
            "/v1/models": lambda: {
                "data": [{"id": MODEL, "root": "/nowhere", "max_model_len": 2048}]
            },
        }
        if self.plugin:
            routes["/v1/minipic"] = lambda: self.capability
            routes["/v1/minipic/tokenizer"] = lambda: {"files": self._files()}
        if path not in routes:
            return httpx.Response(404, json={"detail": "Not Found"})
        return httpx.Response(200, json=routes[path]())

    def _answer(self, entry: Exception | httpx.Response | Sequence[Step]) -> httpx.Response:
        if isinstance(entry, Exception):
            raise entry
        if isinstance(entry, httpx.Response):
            return entry
        return httpx.Response(200, content=self._stream(entry))

    async def _stream(self, steps: Sequence[Step]) -> AsyncIterator[bytes]:
        try:
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step.encode()
        finally:
            self.closed_streams += 1

    def _files(self) -> dict[str, str]:
        with TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return {path.name: path.read_text() for path in Path(folder).iterdir()}
