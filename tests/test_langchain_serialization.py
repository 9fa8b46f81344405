"""No engine and no secret in dumps, traces, pickles and reprs; caches keyed by what matters."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField
from langchain_minipic import ChatMiniPIC, MiniPIC, span_block

from minipic_backend.testing import FakeEngine

SECRETS = {"engine_options": {"hf_token": "hf_SECRET", "max_model_len": 64}, "api_key": "SECRET"}


@pytest.fixture(params=[ChatMiniPIC, MiniPIC])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param(model="m", engine=FakeEngine(), temperature=0.5, **SECRETS)


def test_dumps_and_repr(model: Any) -> None:
    model.invoke("x")
    assert type(model).is_lc_serializable() is False
    for text in (dumps(model), repr(dumpd(model)), repr(model), str(model), repr(model.asdict())):
        assert "SECRET" not in text
        assert "FakeEngine" not in text
    assert model.asdict()["engine_options"] == {"max_model_len": 64}
    assert "engine" not in model.model_dump()


def test_traces(model: Any) -> None:
    seen: list[str] = []

    class Tracer(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            seen.append(repr((args, kwargs)))

        def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
            seen.append(repr((args, kwargs)))

    config: Any = {"callbacks": [Tracer()]}
    model.invoke([HumanMessage([span_block("doc"), "x"])], config)
    list(model.stream("x", config))
    model.batch(["x", "y"], config)
    assert len(seen) == 4
    assert not any("SECRET" in text or "FakeEngine" in text for text in seen)
    assert all("'temperature': 0.5" in text for text in seen)


def test_pickle_leaves_the_engine_behind(model: Any) -> None:
    model.invoke("x")
    again = pickle.loads(pickle.dumps(model))
    assert again.engine is None
    assert again.asdict() == model.asdict()
    assert model.engine is not None


def test_copies_share_the_engine(model: Any) -> None:
    for twin in (copy.deepcopy(model), copy.copy(model), model.model_copy()):
        assert twin.engine is model.engine
        assert twin.invoke("x")


def test_cache_is_keyed_by_model_and_options() -> None:
    cache = InMemoryCache()
    engine = FakeEngine([f"answer {index}" for index in range(20)])
    base = {"engine": engine, "cache": cache}
    variants = [
        ChatMiniPIC(model="a", **base),
        ChatMiniPIC(model="b", **base),
        ChatMiniPIC(model="a", temperature=0.5, **base),
        ChatMiniPIC(model="a", technique="full", **base),
        ChatMiniPIC(model="a", primer=False, **base),
        ChatMiniPIC(model="a", min_p=0.5, **base),
        ChatMiniPIC(model="a", stop=["z"], **base),
        ChatMiniPIC(model="a", engine_options={"dtype": "float32"}, **base),
        ChatMiniPIC(model="a", chat_template_kwargs={"enable_thinking": False}, **base),
        MiniPIC(model="a", **base),
        MiniPIC(model="a", stop=["z"], **base),
    ]
    first = [getattr(llm.invoke("x"), "content", None) or llm.invoke("x") for llm in variants]
    assert len(set(first)) == len(variants) == len(engine.calls)
    again = [getattr(llm.invoke("x"), "content", None) or llm.invoke("x") for llm in variants]
    assert again == first
    chat = variants[0]
    assert chat.bind(technique="full").invoke("x").content == first[3]
    assert chat.bind(technique="full", late=0).invoke("x").content not in first
    assert asyncio.run(chat.ainvoke("x")).content == first[0]
    assert chat.invoke("x", stop=["q"]).content not in first


def test_cache_tells_spans_from_text() -> None:
    llm = ChatMiniPIC(model="m", engine=FakeEngine(["a", "b"]), cache=InMemoryCache())
    assert llm.invoke([HumanMessage([span_block("doc"), "x"])]).content == "a"
    assert llm.invoke([HumanMessage("docx")]).content == "b"


def test_configurable_fields() -> None:
    engine = FakeEngine()
    llm = ChatMiniPIC(model="m", engine=engine).configurable_fields(
        technique=ConfigurableField(id="technique")
    )
    llm.with_config(configurable={"technique": "full"}).invoke("x")
    assert engine.calls[-1].options == {"technique": "full"}
