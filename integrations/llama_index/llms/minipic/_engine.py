"""The engine behind the model: one's own, or one of those shared by configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from llama_index.llms.minipic._options import ModelOptions
from pydantic import PrivateAttr

from minipic_backend import EngineProtocol
from minipic_backend.engines.hold import EngineHold

__all__ = ["EngineBacked"]


class EngineBacked(ModelOptions):
    """A model with an engine behind it, which starts at first use."""

    _hold: EngineHold = PrivateAttr(default_factory=EngineHold)
    _on_close: list[Callable[[], None]] = PrivateAttr(default_factory=list)

    def start(self) -> Self:
        """Start the engine now. Otherwise the first call does, or whatever asks first how long
        the context is."""
        self._hold.meet(self, _room)
        return self

    async def astart(self) -> Self:
        """`start`, without holding up the event loop."""
        await self._aget_engine()
        return self

    def token_ids(self, text: str) -> list[int]:
        """Token ids of `text` by the model's own tokenizer, without special tokens added."""
        return self._get_engine().token_ids(text)

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` by the model's own tokenizer."""
        return self._get_engine().count_tokens(text)

    def close(self) -> None:
        """Give the engine back: its memory is freed once no other open model shares it."""
        self._hold.close(self)
        while self._on_close:
            self._on_close.pop()()

    def call_on_close(self, function: Callable[[], None]) -> None:
        """Have `function` called, once, when this model is closed."""
        self._on_close.append(function)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _get_engine(self) -> EngineProtocol:
        return self._hold.engine(self)

    async def _aget_engine(self) -> EngineProtocol:
        """The engine, without holding up the event loop while it starts, or a server is asked
        what it is."""
        return await self._hold.aengine(self, _room)

    def __getstate__(self) -> dict[Any, Any]:
        """Without any engine: where this is unpickled, the model finds or starts one. Nor with
        callbacks, as in LlamaIndex, which however takes unpicklable ones off the original."""
        left_out = {"engine": None, "callback_manager": None, "rate_limiter": None}
        state = {name: left_out.get(name, value) for name, value in self.__dict__.items()}
        return {
            "__dict__": {name: value for name, value in state.items() if value is not None},
            "__pydantic_extra__": None,
            "__pydantic_fields_set__": set(self.__pydantic_fields_set__),
            "__pydantic_private__": None,
        }

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy on the same engine, unless `update` asks for another."""
        copy = super().model_copy(update=update, deep=deep)
        copy._hold = self._hold.of_copy(self, copy)
        # Closing one of two on the same engine closes the other, too.
        copy._on_close = self._on_close if copy._hold is self._hold else []
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy on the same engine."""
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)


def _room(engine: EngineProtocol) -> int:
    return engine.max_model_len
