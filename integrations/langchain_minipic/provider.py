"""`init_chat_model("minipic:…")`."""

from __future__ import annotations

from typing import Any

from langchain_minipic.chat_models import ChatMiniPIC
from minipic_backend import ConfigurationError

__all__ = ["register_provider"]


def register_provider() -> None:
    """Makes `init_chat_model("minipic:MODEL")`, and so `create_agent("minipic:MODEL", …)`, work.

    LangChain has no public registry of providers: this adds a line to the one it reads
    (`langchain.chat_models.base._BUILTIN_PROVIDERS`). Safe to call twice.

    Raises:
        ConfigurationError: langchain is not installed, or keeps its providers elsewhere.
    """
    try:
        from langchain.chat_models.base import _BUILTIN_PROVIDERS
    except ImportError as error:
        raise ConfigurationError(
            f"init_chat_model cannot be taught about MiniPIC ({error}): use ChatMiniPIC(model=…)"
        ) from error
    _BUILTIN_PROVIDERS["minipic"] = ("langchain_minipic", "ChatMiniPIC", _create)


def _create(cls: Any, **kwargs: Any) -> ChatMiniPIC:
    model: ChatMiniPIC = cls(**kwargs)
    return model
