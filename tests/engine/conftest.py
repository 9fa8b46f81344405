"""The real model, one engine for each key encoding and dtype, and the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minipic_backend.config import KeyEncoding, SpanOptions
from minipic_backend.models import ensure_smollm2

pytest.register_assert_rewrite("check", "rig")

OPTIONS = {
    f"{frame}-{offsets}": SpanOptions(frame, offsets)
    for frame in ("prefix", "none")
    for offsets in ("compact", "padded")
}
KINDS = [
    (dtype, encoding)
    for dtype in ("float32", "bfloat16")
    for encoding in ("span_local", "unrotated")
]


@pytest.fixture(scope="session")
def model() -> str:
    return str(ensure_smollm2(progress=False))


@pytest.fixture(scope="session")
def tiny_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One with random weights, for engines that only have to start: in a third of the time."""
    from tiny_models import save_tiny

    return save_tiny(
        tmp_path_factory.mktemp("tiny"), model, "llama", hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def truth(model: str) -> Any:
    from truth import Truth

    return Truth.load(model)


class Rigs:
    """Engines, started when a test first asks for one, and closed at the end."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.started: dict[tuple[str, str], Any] = {}

    def get(self, dtype: str = "float32", encoding: KeyEncoding = "span_local") -> Any:
        from rig import Rig

        from minipic_backend import Engine

        if (dtype, encoding) not in self.started:
            engine = Engine(
                self._model,
                dtype=dtype,
                key_encoding=encoding,
                max_model_len=2048,
                max_logprobs=-1,
                kv_cache_gib=0.25 if dtype == "float32" else 0.125,
            )
            self.started[dtype, encoding] = Rig(engine._driver, engine)
        return self.started[dtype, encoding]

    def close(self) -> None:
        for rig in self.started.values():
            rig.engine.close()


@pytest.fixture(scope="session")
def rigs(model: str) -> Iterator[Rigs]:
    rigs = Rigs(model)
    yield rigs
    rigs.close()


@pytest.fixture(scope="session", params=KINDS, ids="-".join)
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Any:
    """Each of the four engines in turn."""
    return rigs.get(*request.param)


@pytest.fixture(scope="session")
def exact_rig(rigs: Rigs) -> Any:
    """The float32 engine with the default key encoding."""
    return rigs.get()


@pytest.fixture(scope="session", params=["span_local", "unrotated"])
def float32_rig(request: pytest.FixtureRequest, rigs: Rigs) -> Any:
    """Both key encodings, in float32."""
    return rigs.get("float32", request.param)


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def options(request: pytest.FixtureRequest) -> SpanOptions:
    """Both frames with both offset layouts."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def make(rig: Any) -> Any:
    """Prompts for the engine of the test."""
    from prompts import PromptMaker

    return PromptMaker(rig.engine.tokenizer, rig.config)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test every engine is idle, with every block free."""
    yield
    if "rigs" in request.fixturenames:
        for rig in request.getfixturevalue("rigs").started.values():
            rig.assert_idle()
