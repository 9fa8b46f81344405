"""What a client knows about its server once it has asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from minipic_backend.capability import ROUTE, TOKENIZER_ROUTE, Capability
from minipic_backend.config import SpanConfig
from minipic_backend.errors import (
    ConfigurationError,
    MiniPICError,
    ModelNotFoundError,
    PluginMissingError,
    shown,
)
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.models.tokenizer import load_tokenizer
from minipic_backend.remote.failures import as_ours
from minipic_backend.remote.tokenizers import (
    check_tokenizer,
    kept_folder,
    local_model,
    tokenizer_from_files,
)
from minipic_backend.remote.transport import Transport

__all__ = ["OnMissingPlugin", "Server", "ServerFacts"]

OnMissingPlugin = Literal["error", "plain"]

# A server without the plugin gets no markers; these stand for three tokens that no model has.
_NO_MARKERS = SpanConfig(ssep=2**31 - 1, pdep=2**31 - 2, pad=2**31 - 3, block_size=1)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server, verified.

    Args:
        model: what requests name.
        max_model_len: tokens that a prompt and its answer may have together.
        tokenizer: the server's.
        layout: made of it.
        capability: None for a server without the plugin.
        sampling_defaults: what the server takes where a request says nothing, as far as known.
    """

    model: str
    max_model_len: int
    tokenizer: Any
    layout: Layout
    capability: Capability | None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


class Server:
    """Asks a server once what it is, at first use.

    Args:
        transport: the way to it.
        model: as the server names it, or None for the only one there.
        tokenizer: a tokenizer, a folder, or a hub name; None: a local folder of the model's, or
            the server's.
        on_missing_plugin: "error", or "plain" to serve ordinary prompts.
        key_encoding: what the server must have; None: anything.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        model: str | None,
        tokenizer: Any,
        on_missing_plugin: OnMissingPlugin,
        key_encoding: str | None,
    ) -> None:
        self._transport = transport
        self._model = model
        self._tokenizer = tokenizer
        self._on_missing_plugin = on_missing_plugin
        self._key_encoding = key_encoding
        self._lock = threading.Lock()
        self._facts: ServerFacts | None = None

    def facts(self) -> ServerFacts:
        """Raises:
        ConfigurationError: client and server do not fit; says what to change.
        PluginMissingError: a server without the plugin, and `on_missing_plugin="error"`.
        ServerUnreachableError, ServerTimeoutError: no answer.
        """
        with self._lock:  # others wait for the first
            if self._facts is None:
                self._facts = self._ask()
            return self._facts

    def _ask(self) -> ServerFacts:
        found = self._transport.get(ROUTE)
        if found.status_code == 404:
            return self._without_plugin()
        capability = Capability.from_dict(_json(found, self._transport.base_url))
        if self._key_encoding not in (None, capability.config.key_encoding):
            raise ConfigurationError(
                f"key_encoding={shown(self._key_encoding)}, but the server has "
                f"{shown(capability.config.key_encoding)}: leave it out, or start the server with "
                f"--key-encoding {self._key_encoding}"
            )
        model = self._served(capability.models)
        tokenizer = self._verified_tokenizer(capability)
        return ServerFacts(
            model,
            capability.max_model_len,
            tokenizer,
            Layout(tokenizer, capability.config),
            capability,
            capability.sampling_defaults,
        )

    def _without_plugin(self) -> ServerFacts:
        base_url = self._transport.base_url
        found = self._transport.get("/models")
        if found.status_code == 404:
            url = httpx.URL(base_url)
            hint = "is it vLLM's?" if url.path.endswith("/v1") else f"try {url.join('/v1')}"
            raise ConfigurationError(
                f"The server at {base_url} has neither /minipic nor /models there: base_url is the "
                f"address of an OpenAI API, with its /v1; {hint}"
            )
        cards = _json(found, base_url).get("data") or []
        if self._on_missing_plugin == "error":
            raise PluginMissingError(
                f"The server at {base_url} runs without the MiniPIC plugin: start it with `minipic "
                "serve MODEL`, or pass on_missing_plugin='plain' to send ordinary prompts, "
                "without reuse of documents"
            )
        model = self._served(tuple(card["id"] for card in cards))
        card = next(card for card in cards if card["id"] == model)
        tokenizer = self._tokenizer
        if tokenizer is None or isinstance(tokenizer, str):
            name = tokenizer or local_model(model) or card.get("root") or model
            try:
                tokenizer = load_tokenizer(name)
            except ModelNotFoundError as error:
                raise ModelNotFoundError(
                    f"{error}. A server without the plugin does not hand out its tokenizer: pass "
                    "tokenizer=, a folder or a hub name"
                ) from error
        if not card.get("max_model_len"):
            raise ConfigurationError(
                f"The server at {base_url} does not say how long its context is: is it vLLM?"
            )
        layout = Layout(tokenizer, _NO_MARKERS)
        return ServerFacts(model, int(card["max_model_len"]), tokenizer, layout, None)

    def _served(self, models: tuple[str, ...]) -> str:
        if self._model is None and models:
            return models[0]
        if self._model not in models:
            raise ConfigurationError(
                f"The server at {self._transport.base_url} serves "
                f"{', '.join(models) or 'nothing'}, not {self._model}: change model=, or start it "
                "with --served-model-name"
            )
        assert self._model is not None
        return self._model

    def _verified_tokenizer(self, capability: Capability) -> Any:
        given, digest = self._tokenizer, capability.tokenizer_digest
        if given is None and self._model is not None:
            given = local_model(self._model)
        if given is not None:
            tokenizer = load_tokenizer(given) if isinstance(given, str) else given
            name = given if isinstance(given, str) else type(given).__name__
            check_tokenizer(tokenizer, name, digest)
            return tokenizer
        return self._fetched_tokenizer(digest)

    def _fetched_tokenizer(self, digest: str) -> Any:
        def fetch() -> Any:
            found = self._transport.get(TOKENIZER_ROUTE)
            return tokenizer_from_files(_json(found, self._transport.base_url)["files"], digest)

        load: Callable[[], Any] = fetch
        if (folder := kept_folder(digest)).is_dir():
            load = lambda: load_tokenizer(str(folder))  # noqa: E731
        tokenizer = load()
        check_tokenizer(tokenizer, f"the server, kept in {folder},", digest)
        return tokenizer


def _json(response: Any, base_url: str) -> Any:
    try:
        response.raise_for_status()
        return response.json()
    except Exception as error:  # a status of httpx's, or what is no JSON
        ours: MiniPICError = as_ours(error, base_url)
        raise ours from error
