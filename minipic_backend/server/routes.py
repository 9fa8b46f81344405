"""`GET /v1/minipic` and `GET /v1/minipic/tokenizer`: what a client has to know and to have."""

from __future__ import annotations

import copy
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from minipic_backend import __version__
from minipic_backend.capability import ROUTE, TOKENIZER_ROUTE, Capability
from minipic_backend.config import SpanConfig
from minipic_backend.layout.tokenizer_digest import tokenizer_digest

__all__ = ["Facts", "router"]

router = APIRouter(tags=["minipic"])


@dataclass(frozen=True)
class Facts:
    """Of a running server.

    Args:
        config: markers, pad, block size, key encoding.
        tokenizer: the server's, with the chat template that it applies.
        models: vLLM's registry of served names.
        max_model_len: tokens that a prompt and its answer may have together.
        sampling_defaults: from the model's generation config.
        reports_cached_tokens: whether usage names them.
    """

    config: SpanConfig
    tokenizer: Any
    models: Any
    max_model_len: int
    sampling_defaults: dict[str, Any]
    reports_cached_tokens: bool

    @classmethod
    def of(cls, state: Any, args: Namespace) -> Facts:
        """Of the application state that vLLM has just set up."""
        from minipic_backend.plugin.enable import span_config

        tokenizer = state.online_renderer.renderer.get_tokenizer()
        if (template := state.online_renderer.chat_template) is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = template
        model = state.vllm_config.model_config
        return cls(
            span_config(state.vllm_config),
            tokenizer,
            state.openai_serving_models,
            model.max_model_len,
            model.get_diff_sampling_param(),
            args.enable_prompt_tokens_details,
        )

    @cached_property
    def digest(self) -> str:
        """See `tokenizer_digest`."""
        return tokenizer_digest(self.tokenizer)

    @cached_property
    def tokenizer_files(self) -> dict[str, str]:
        """Name → text: what `from_pretrained` wants, and no code."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return {
                path.name: path.read_text(encoding="utf-8")
                for path in sorted(Path(folder).iterdir())
                if path.suffix in (".json", ".jinja", ".txt")
            }

    def capability(self) -> Capability:
        """For a client, now: adapters may come and go."""
        from vllm.version import __version__ as vllm_version

        models = self.models
        adapters = list(models.lora_requests)
        return Capability(
            minipic_version=__version__,
            vllm_version=vllm_version,
            models=(*(path.name for path in models.base_model_paths), *adapters),
            max_model_len=self.max_model_len,
            config=self.config,
            tokenizer_digest=self.digest,
            sampling_defaults=self.sampling_defaults,
            reports_cached_tokens=self.reports_cached_tokens,
        )


@router.get(f"/v1{ROUTE}")
def capabilities(request: Request) -> dict[str, Any]:
    """What this server's MiniPIC is and can do."""
    facts: Facts = request.app.state.minipic
    return facts.capability().to_dict()


@router.get(f"/v1{TOKENIZER_ROUTE}")
def tokenizer(request: Request) -> dict[str, Any]:
    """The tokenizer's files, for clients that do not have the model."""
    facts: Facts = request.app.state.minipic
    return {"digest": facts.digest, "files": facts.tokenizer_files}
