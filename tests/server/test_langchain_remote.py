"""LangChain's own integration suites, and ours for text models, against a server."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_suites import ChatSuite, RetrieverSuite, TextSuite

from minipic_backend.models import HUB_NAME

process = pytest.importorskip("process", reason="the server of tests/server/conftest.py")


@pytest.fixture(scope="module")
def vcr_config() -> dict[str, Any]:
    """The suite's one recorded test must not catch what the fixtures ask the server."""
    return {"ignore_localhost": True}


class _Remote:
    found: dict[str, Any]

    @pytest.fixture(autouse=True)
    def find(self, server: Any) -> None:
        address = {"base_url": server.base_url, "api_key": process.API_KEY}
        type(self).found = {"model": HUB_NAME, **address, "temperature": 0}

    @property
    def params(self) -> dict[str, Any]:
        return self.found


class TestRemoteChat(_Remote, ChatSuite):
    pass


class TestRemoteText(_Remote, TextSuite):
    pass


class TestRemoteRetriever(_Remote, RetrieverSuite):
    pass
