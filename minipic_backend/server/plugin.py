"""vLLM's endpoint plugin: what `minipic serve` adds to the API server."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from minipic_backend.choices import LAYOUT_DEFAULTS
from minipic_backend.config import CONFIG_KEY

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["LAYOUT_ARGUMENT", "EndpointPlugin"]

LAYOUT_ARGUMENT = "minipic_layout"
"""Attribute of vLLM's parsed arguments: defaults of layout options, as `minipic serve` was told."""


class EndpointPlugin:
    """Loaded by vLLM where `VLLM_PLUGINS` names it. Does nothing on a server without spans."""

    name = "minipic"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds `/v1/minipic`, and `/v1/messages` in a form that keeps marks."""
        if _enabled(app.state.args):
            from minipic_backend.server.messages import router as messages
            from minipic_backend.server.routes import router

            app.include_router(router)
            app.include_router(messages)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Lets vLLM's handlers render requests with marks by our layout."""
        if engine_client is None or not _enabled(args):
            return
        from minipic_backend.server.messages import keep_marks
        from minipic_backend.server.rendering import SpanRenderer, take_over
        from minipic_backend.server.routes import Facts

        defaults = {**LAYOUT_DEFAULTS, **(getattr(args, LAYOUT_ARGUMENT, None) or {})}
        state.minipic = Facts.of(state, args)
        take_over(state.online_renderer, SpanRenderer(state.minipic, defaults))
        keep_marks(state)


def _enabled(args: Namespace) -> bool:
    additional = getattr(args, "additional_config", None)
    return isinstance(additional, dict) and CONFIG_KEY in additional
