"""vLLM's online renderer, for requests that have to do with spans.

Every route of text goes through it: completions, chat, Anthropic's messages, responses. What has
no mark and no marker is rendered by vLLM itself, unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from vllm.renderers.online_renderer import OnlineRenderer

from minipic_backend.choices import choose_layout
from minipic_backend.config import CONFIG_KEY, SpanOptions, TechniqueSettings
from minipic_backend.errors import (
    ConfigurationError,
    ContextWindowError,
    EngineError,
    PromptError,
    shown,
)
from minipic_backend.json_messages import MARK, has_marks, read_messages
from minipic_backend.layout.prompt_layout import LaidOutPrompt, Layout
from minipic_backend.plugin.hasher import prompt_segments
from minipic_backend.plugin.requests import refuse_unsendable
from minipic_backend.prompt import Prompt
from minipic_backend.server.routes import Facts
from minipic_backend.spans.segments import has_markers

__all__ = ["SpanRenderer", "take_over"]

_READY_IDS = "prompt_token_ids"

# Options of a chat, and what switches them off, that vLLM ignores or breaks with ready token ids.
_ONLY_RENDERED = {"echo": False, "use_beam_search": False, "truncate_prompt_tokens": None}

# What a request asks about; all else of it are options.
_PROMPTS = {"input", "messages", "prompt", "token_ids", "tools"}

# Arguments of transformers' `apply_chat_template` that are not the template's to choose.
_NOT_TEMPLATE = {
    "add_generation_prompt",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class SpanRenderer:
    """Lays out requests with marks, and refuses misplaced markers before anything is streamed.

    Args:
        facts: the server's.
        defaults: of layout options.

    Raises:
        ConfigurationError: defaults that mean nothing, or a tokenizer that cannot be used.
    """

    def __init__(self, facts: Facts, defaults: Mapping[str, Any]) -> None:
        self._config = facts.config
        self._max_model_len = facts.max_model_len
        self._defaults = defaults
        # No memory of tokenized documents: its timing would tell one tenant of another's.
        self._layout = Layout(facts.tokenizer, facts.config, max_cached_tokens=0)
        self._choose({})

    async def lay_out(
        self, request: Any, messages: Sequence[Any], template: Mapping[str, Any], tools: Any
    ) -> list[int]:
        """Token ids of a chat with marks; the request gets the span options that go with them.

        Args:
            request: vLLM's, with our options in its extra field `minipic`.
            messages: as the client wrote them.
            template: arguments of the chat template.
            tools: as the chat template takes them.

        Raises:
            PromptError, ConfigurationError: HTTP 400.
        """
        settings, options = self._choose((request.model_extra or {}).get(MARK))
        # Off the event loop: a long prompt must not hold up the others.
        try:
            laid_out = await asyncio.to_thread(
                self._lay_out, messages, template, tools, settings, options
            )
        except RecursionError as error:
            raise PromptError("The chat is nested too deeply") from error
        if laid_out.table is not None:
            options = laid_out.table.options
        further = getattr(request, "vllm_xargs", None) or {}  # /tokenize knows none
        request.vllm_xargs = {**further, CONFIG_KEY: json.dumps(options.to_dict())}
        return list(laid_out.token_ids)

    def has_markers(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt has a marker anywhere."""
        return has_markers(token_ids, self._config)

    def check(self, engine_input: Mapping[str, Any], request: Any) -> None:
        """Refuses what the engine would, which says so only after a streamed answer has begun.

        Raises:
            PromptError, ConfigurationError: HTTP 400.
        """
        table = prompt_segments(
            _token_ids(engine_input),
            getattr(request, "vllm_xargs", None),
            self._config,
            only_tokens=engine_input["type"] == "token",
            max_model_len=self._max_model_len,
        )
        if table is not None and getattr(request, "use_beam_search", False):
            # vLLM would send each beam as a prompt of its own, without the span options.
            raise PromptError("use_beam_search does not go together with spans: leave it out")

    def _choose(self, chosen: Any) -> tuple[TechniqueSettings, SpanOptions]:
        if chosen is not None and not isinstance(chosen, Mapping):
            raise ConfigurationError(f"{MARK}: expected an object of options, not {shown(chosen)}")
        given = {key: value for key, value in (chosen or {}).items() if value is not None}
        if unknown := sorted(set(given) - set(self._defaults)):
            raise ConfigurationError(
                f"{MARK}: unknown option {', '.join(map(shown, unknown))}; known: "
                f"{', '.join(sorted(self._defaults))}"
            )
        return choose_layout(self._defaults, given)

    def _lay_out(
        self,
        messages: Sequence[Any],
        template: Mapping[str, Any],
        tools: Any,
        settings: TechniqueSettings,
        options: SpanOptions,
    ) -> LaidOutPrompt:
        given = {key: value for key, value in template.items() if value is not None}
        prompt = Prompt.chat(
            # As vLLM joins the texts of a message.
            read_messages(messages, between_texts="\n"),
            tools=tools or (),
            template_kwargs={k: v for k, v in given.items() if k not in _NOT_TEMPLATE},
            add_generation_prompt=given.get("add_generation_prompt", True),
        )
        if settings.spans and len(prompt.spans) * self._config.block_size > self._max_model_len:
            # Not worth a minute of tokenizing.
            raise ContextWindowError(
                len(prompt.spans) * self._config.block_size, self._max_model_len
            )
        laid_out = self._layout.lay_out(prompt, settings, options=options)
        if len(laid_out.token_ids) >= self._max_model_len:
            raise ContextWindowError(len(laid_out.token_ids), self._max_model_len)
        return laid_out


class _SpanOnlineRenderer(OnlineRenderer):
    minipic: SpanRenderer

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        async def stock(messages: list[Any]) -> Any:
            return await OnlineRenderer.preprocess_chat(
                self,
                request,
                messages,
                default_template,
                default_template_content_format,
                default_template_kwargs,
                tool_dicts,
                parser,
                skip_mm_cache=skip_mm_cache,
            )

        _check_options(request)
        kept = dict(getattr(request, "kv_transfer_params", None) or {})
        ready_ids = kept.pop(_READY_IDS, None)
        if not has_marks(messages):
            rendered = await stock(messages)
            if not any(self.minipic.has_markers(_token_ids(one)) for one in rendered[1]):
                for one in rendered[1]:
                    self.minipic.check(one, request)
                return rendered
            if ready_ids is not None:
                raise PromptError(
                    f"kv_transfer_params.{_READY_IDS} may hold no markers; send such a prompt to "
                    "/v1/completions"
                )
            # Somebody's text spells out a marker. As text, it is not one.
        if CONFIG_KEY in (getattr(request, "vllm_xargs", None) or {}):
            raise ConfigurationError(
                f"vllm_xargs.{CONFIG_KEY} is for prompts of token ids; a chat with marks, or with "
                f"text that spells out a marker, takes its options in {MARK!r}"
            )
        _check_laid_out(request)
        chat_params = request.build_chat_params(
            default_template, default_template_content_format
        ).with_defaults(default_template_kwargs)
        template = dict(chat_params.chat_template_kwargs)
        if chat_params.chat_template is not None:
            template["chat_template"] = chat_params.chat_template
        ids = await self.minipic.lay_out(request, messages, template, tool_dicts)
        # vLLM takes ready token ids here, from a prefill server as it thinks, and goes on with
        # tools and reasoning as ever. It sees no messages: some of them make it render those.
        request.kv_transfer_params = {**kept, _READY_IDS: ids}
        try:
            conversation, inputs = await stock([])
        finally:
            request.kv_transfer_params = kept or None
        if [list(_token_ids(one)) for one in inputs] != [ids]:
            raise EngineError("vLLM rendered the chat itself, although it was laid out")
        return conversation, inputs

    async def preprocess_completion(
        self,
        request: Any,
        prompt_input: Any,
        prompt_embeds: Any,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        _check_options(request)
        inputs = await OnlineRenderer.preprocess_completion(
            self, request, prompt_input, prompt_embeds, skip_mm_cache=skip_mm_cache
        )
        is_text = isinstance(prompt_input, str) or (
            isinstance(prompt_input, list) and any(isinstance(one, str) for one in prompt_input)
        )
        for one in inputs:
            ids = _token_ids(one)
            self.renderer.validate_token_ids(ids)
            if is_text and self.minipic.has_markers(ids):
                raise PromptError(
                    "The prompt's text spells out a marker, which only prompts of token ids may "
                    "hold; mark documents in /v1/chat/completions, or send token ids"
                )
            self.minipic.check(one, request)
        return inputs


def take_over(online_renderer: Any, spans: SpanRenderer) -> None:
    """Makes a running server's renderer one of ours; all of vLLM's handlers share it."""
    online_renderer.__class__ = _SpanOnlineRenderer
    online_renderer.minipic = spans


def _check_options(request: Any) -> None:
    """Refuses options that no engine can be sent. vLLM would fail at them later: as a failure of
    the server, or, in a stream, behind a status that says that all is well."""
    if isinstance(request, BaseModel):
        for name, value in request:
            if name not in _PROMPTS and name in type(request).model_fields:
                refuse_unsendable(value, f"The request's {name}")


def _check_laid_out(request: Any) -> None:
    for name, off in _ONLY_RENDERED.items():
        if getattr(request, name, off) not in (None, off):
            raise PromptError(
                f"{name} does not go together with marked documents, nor with text that spells out "
                "a marker: leave it out"
            )


def _token_ids(engine_input: Mapping[str, Any]) -> Sequence[int]:
    return engine_input.get("prompt_token_ids") or ()
