"""Engines shared by configuration: two models that ask for the same engine get the same one.

An engine starts at first use and lives until the last open model of its configuration is closed,
or the interpreter exits. Dropping a model without closing it leaves the engine warm for the next.
"""

from __future__ import annotations

import atexit
import inspect
import threading
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from minipic_backend.errors import ConfigurationError, EngineClosedError
from minipic_backend.protocol import EngineProtocol

__all__ = ["EngineLease", "EngineSpec", "close_all", "create_engine", "without_secrets"]


@dataclass(frozen=True)
class EngineSpec:
    """Everything that an engine is built from. `client` holds what only a remote one needs; its
    `model` may be empty: the one that is served."""

    model: str
    base_url: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> EngineSpec:
        """What the fields of a framework's model ask for."""
        client = {
            "api_key": model.api_key,
            "max_retries": model.max_retries,
            "headers": model.headers,
            **({} if model.timeout is None else {"timeout": model.timeout}),
            "on_missing_plugin": model.on_missing_plugin,
        }
        return cls(model.model, model.base_url, model.engine_options, client)

    @property
    def key(self) -> Hashable:
        client = self.client if self.base_url else {}
        return (self.model, self.base_url, _freeze(self.options), _freeze(client))


def create_engine(spec: EngineSpec) -> EngineProtocol:
    """The one place where engines come from.

    Raises:
        ConfigurationError: an option that the engine does not have.
        MiniPICError: whatever keeps the engine from starting.
    """
    if spec.base_url is not None:
        from minipic_backend.remote import RemoteEngine

        options = {**spec.client, **spec.options}
        known = inspect.signature(RemoteEngine).parameters
        if unknown := sorted(set(options) - set(known)):
            raise ConfigurationError(
                f"A remote engine does not know {', '.join(unknown)}: an option of the engine is "
                "for its server, `minipic serve MODEL --help=all`"
            )
        return RemoteEngine(spec.base_url, model=spec.model or None, **options)
    from minipic_backend.engines.embedded import Engine  # late: it pulls in vLLM

    return Engine(model=spec.model, **spec.options)


class EngineLease:
    """One model's hold on a shared engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._engine: EngineProtocol | None = None
        self._closed = False

    def engine(self) -> EngineProtocol:
        """The engine, started if need be; one thread starts it, the others wait.

        Raises:
            EngineClosedError: this lease was closed.
        """
        engine = self._engine
        if engine is None and not self._closed:
            engine = self._engine = _open(self)
        if engine is None or self._closed:
            raise EngineClosedError("This model was closed; make a new one to go on")
        return engine

    def close(self) -> None:
        """Give the engine back; the last one to do so closes it. Any further call does nothing."""
        if not self._closed:
            self._closed = True
            self._engine = None
            _release(self)


@dataclass
class _Shared:
    engine: EngineProtocol | None = None
    starting: threading.Lock = field(default_factory=threading.Lock)
    leases: WeakSet[EngineLease] = field(default_factory=WeakSet)


_shared: dict[Hashable, _Shared] = {}
_lock = threading.Lock()


def _open(lease: EngineLease) -> EngineProtocol:
    with _lock:
        shared = _shared.setdefault(lease.spec.key, _Shared())
        shared.leases.add(lease)
    with shared.starting:
        if shared.engine is None:
            shared.engine = create_engine(lease.spec)
        return shared.engine


def _release(lease: EngineLease) -> None:
    with _lock:
        shared = _shared.get(lease.spec.key)
        if shared is None or lease not in shared.leases:
            return
        shared.leases.discard(lease)
        if shared.leases:
            return
        del _shared[lease.spec.key]
    with shared.starting:
        if shared.engine is not None:
            shared.engine.close()


def close_all() -> None:
    """Close every shared engine, whoever holds it."""
    with _lock:
        engines = [shared.engine for shared in _shared.values()]
        _shared.clear()
    for engine in engines:
        if engine is not None:
            with suppress(Exception):  # nobody is left to handle it
                engine.close()


atexit.register(close_all)


def _freeze(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _freeze(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_freeze(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's options as they may be shown and stored."""
    secret = ("token", "api_key", "password", "secret")
    return {name: value for name, value in options.items() if not name.endswith(secret)}
