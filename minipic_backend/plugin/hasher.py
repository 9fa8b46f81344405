"""vLLM's block hasher, replaced for prompts that have spans."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from minipic_backend.config import CONFIG_KEY, SpanConfig, SpanOptions
from minipic_backend.errors import ConfigurationError, PromptError, shown
from minipic_backend.plugin import seams
from minipic_backend.spans.hashing import SpanHashChain
from minipic_backend.spans.segments import SegmentTable, has_markers, is_framed_span, parse_segments
from minipic_backend.spans.span_hashes import SpanHashes

__all__ = [
    "SpanBlockHasher",
    "may_have_places",
    "prompt_segments",
    "request_segments",
    "worker_segments",
]


class SpanBlockHasher:
    """Called by vLLM's `Request` at its start and whenever tokens are appended.

    An ordinary prompt gets what `stock` gives, to the byte. One with markers gets nothing at its
    start: vLLM makes requests on a thread that shares the interpreter with the one that launches
    kernels, and a burst of prompts would keep these waiting. The scheduler, on the latter, has the
    prompt read and hashed when its turn comes.
    """

    def __init__(
        self,
        config: SpanConfig,
        stock: Callable[[Any], list[Any]],
        hash_block_size: int,
        hash_function: Callable[[Any], bytes],
    ) -> None:
        if hash_block_size != config.block_size:
            raise ConfigurationError(
                f"vLLM hashes {hash_block_size} tokens at a time, but its blocks have "
                f"{config.block_size}: markers must sit where both agree"
            )
        self._config = config
        self._stock = stock
        self._hash_function = hash_function
        self._none_hash = seams.none_hash()
        self._known = SpanHashes()

    def __call__(self, request: Any) -> list[Any]:
        chain = getattr(request, "minipic_chain", None)
        if chain is None:
            if self._may_have_spans(request):
                return []
            chain = request.minipic_chain = False
        if chain is False:
            return self._stock(request)

        def extra_keys(start: int, end: int, salted: bool) -> tuple[Any, ...] | None:
            # vLLM salts the block that starts at token 0; nothing else depends on `start` here.
            keys: tuple[Any, ...] | None
            start = start if salted else max(start, 1)
            keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            return keys

        assert isinstance(chain, SpanHashChain)
        return chain.extend(request.block_hashes, request.all_token_ids, extra_keys)

    def read(self, request: Any) -> SegmentTable | None:
        """Reads a request's prompt, once: its segments, None where it is an ordinary one. From then
        on, hashes are to be had.

        Raises:
            MiniPICError: as `prompt_segments`.
        """
        chain = getattr(request, "minipic_chain", None)
        if chain is None:
            chain = request.minipic_chain = self._chain(request)
        return chain.table if isinstance(chain, SpanHashChain) else None

    def _may_have_spans(self, request: Any) -> bool:
        prompt = request.prompt_token_ids
        if prompt is None:
            return False
        # Where they count: vLLM's front end has refused what has them elsewhere. To look at every
        # token of a long prompt again would keep an ordinary one waiting.
        if has_markers(prompt[:: self._config.block_size], self._config):
            return True
        # Options that are wrong without spans are refused where a prompt is read.
        return CONFIG_KEY in (getattr(request.sampling_params, "extra_args", None) or ())

    def _chain(self, request: Any) -> SpanHashChain | bool:
        """The request's chain of hashes, or False where its prompt is an ordinary one."""
        prompt = request.prompt_token_ids
        if prompt is None:
            return False
        prompt = np.asarray(prompt, dtype=np.int64)
        table = request_segments(request, self._config, prompt)
        if table is None:
            return False
        return SpanHashChain(
            table,
            self._config,
            self._hash_function,
            self._none_hash,
            request.cache_salt,
            prompt,
            self._known,
        )


def prompt_segments(
    token_ids: Sequence[int] | NDArray[np.int64],
    extra_args: Mapping[str, Any] | None,
    config: SpanConfig,
    *,
    only_tokens: bool = True,
    max_model_len: int | None = None,
) -> SegmentTable | None:
    """Segments of a prompt; None where it is an ordinary one. The one reading of a request: what it
    refuses is refused wherever requests come in.

    Args:
        token_ids: of the prompt.
        extra_args: the request's, with its span options: an object or, as HTTP carries it in
            `vllm_xargs`, one written as JSON.
        config: the engine's.
        only_tokens: whether the prompt is its token ids, without images or embeddings.
        max_model_len: positions that the model has, where the caller knows.

    Raises:
        MalformedSpansError: markers or pads at the wrong place.
        ConfigurationError: span options that nobody knows.
        PromptError: spans together with images or prompt embeddings, or places that lead past the
            model's positions.
    """
    table = parse_segments(token_ids, config, _request_options(extra_args, config))
    if table is None:
        return None
    if not only_tokens:
        raise PromptError("Spans do not go together with images or prompt embeddings")
    if max_model_len is not None and table.generated_position >= max_model_len:
        raise PromptError(
            f"The answer would begin at position {table.generated_position}, but the context of "
            f"this model holds {max_model_len}"
        )
    return table


def may_have_places(request: Any, config: SpanConfig) -> bool:
    """Whether options of a request, or the engine's own, may put segments further on."""
    values = _given_options(getattr(request.sampling_params, "extra_args", None))
    if isinstance(values, Mapping) and "places" in values:
        return bool(values["places"])
    return bool(config.options.places)


def _given_options(extra_args: Mapping[str, Any] | None) -> Any:
    """What a request says about its spans: a mapping, None, or something wrong."""
    values = (extra_args or {}).get(CONFIG_KEY)
    if isinstance(values, str):
        with suppress(ValueError, RecursionError):
            return json.loads(values)
    return values


def _request_options(extra_args: Mapping[str, Any] | None, config: SpanConfig) -> SpanOptions:
    """What a request chose about its spans, laid over the engine's defaults."""
    values = _given_options(extra_args)
    if values is None:
        return config.options
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f'{CONFIG_KEY}={shown(values)}: expected options such as {{"frame": "none"}}'
        )
    return SpanOptions.from_dict(values, config.options)


def request_segments(
    request: Any,
    config: SpanConfig,
    prompt: NDArray[np.int64] | None = None,
    *,
    max_model_len: int | None = None,
) -> SegmentTable | None:
    """`prompt_segments` of a request of vLLM's, or of anything with the same attributes.

    Args:
        request: the request.
        config: the engine's.
        prompt: its token ids, where they are at hand as an array.
        max_model_len: as for `prompt_segments`.
    """
    token_ids = request.prompt_token_ids if prompt is None else prompt
    if token_ids is None:
        return None
    only_tokens = not request.mm_features and request.prompt_embeds is None
    extra_args = getattr(request.sampling_params, "extra_args", None)
    return prompt_segments(
        token_ids, extra_args, config, only_tokens=only_tokens, max_model_len=max_model_len
    )


def worker_segments(request: Any, config: SpanConfig) -> SegmentTable | None:
    """Segments as a worker needs them: None too for `frame + span`, a job of the scheduler's.

    Args:
        request: what the scheduler sent of it (then as it was read there, if it was), or anything
            with a request's attributes.
        config: the engine's.
    """
    if hasattr(request, "minipic_table"):
        known: SegmentTable | None = request.minipic_table
        return known
    prompt = request.prompt_token_ids
    if prompt is None or not has_markers(prompt, config):
        return None
    prompt = np.asarray(prompt, dtype=np.int64)
    return None if is_framed_span(prompt, config) else request_segments(request, config, prompt)
