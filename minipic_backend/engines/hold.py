"""What a framework's model has of its engine: its own, or one shared by configuration."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

from minipic_backend.engines.shared import EngineLease, EngineSpec
from minipic_backend.errors import EngineClosedError
from minipic_backend.protocol import EngineProtocol

__all__ = ["EngineHold"]

_making_lease = threading.Lock()


class EngineHold:
    """A model's hold on its engine; its copies share it, whichever of them starts the engine.

    A model has the fields that `EngineSpec.of` reads, and `engine`: its own, or None for a shared
    one. It hands itself over in each call, so that nothing here keeps it alive.

    Attributes:
        closed: whether the model was closed.
        met: whether the engine runs and has told what calls on an event loop ask of it.
    """

    def __init__(self) -> None:
        self.closed = False
        self.met = False
        self._lease: EngineLease | None = None

    def engine(self, model: Any) -> EngineProtocol:
        """The engine, started if need be.

        Raises:
            EngineClosedError: the model was closed.
        """
        if model.engine is None:
            return self.lease(model).engine()
        if self.closed:
            raise EngineClosedError("This model was closed; make a new one to go on")
        own: EngineProtocol = model.engine
        return own

    def meet(self, model: Any, ask: Callable[[EngineProtocol], object]) -> None:
        """Starts the engine, and asks it what it may have to ask a server."""
        ask(self.engine(model))
        self.met = True

    async def aengine(self, model: Any, ask: Callable[[EngineProtocol], object]) -> EngineProtocol:
        """The engine, without holding up the event loop while it starts, or is asked for the first
        time; see `meet`."""
        if not self.met:
            await asyncio.to_thread(self.meet, model, ask)
        return self.engine(model)

    def lease(self, model: Any) -> EngineLease:
        """Of a shared engine, the same for whichever thread asks first."""
        with _making_lease:
            if self._lease is None:
                self._lease = EngineLease(EngineSpec.of(model))
            return self._lease

    def close(self, model: Any) -> None:
        """Gives the engine back. One's own stays open."""
        self.closed = True
        self.lease(model).close()

    def of_copy(self, model: Any, copy: Any) -> EngineHold:
        """The hold of a model's copy: this one, unless the copy asks for another engine."""
        same = copy.engine is model.engine and EngineSpec.of(copy).key == EngineSpec.of(model).key
        return self if same else EngineHold()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
