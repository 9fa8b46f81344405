"""What the scheduler does about hashes: puts the block hasher in place, tells what is cached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from minipic_backend.errors import ConfigurationError, MiniPICError
from minipic_backend.plugin import seams
from minipic_backend.plugin.enable import check_config
from minipic_backend.plugin.hasher import SpanBlockHasher, may_have_places
from minipic_backend.spans.segments import SegmentTable

__all__ = ["SpanHashing"]

_log = init_logger(f"vllm.{__name__}")


class SpanHashing(Scheduler):
    """Span-aware hashes for a scheduler's requests; checks that the other parts are in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.span_config = check_config(self.vllm_config, self.kv_cache_config)
        self.span_hasher: SpanBlockHasher | None = None

    def install_hasher(self) -> None:
        """The last that a scheduler does while it is built: what fails before leaves no trace."""
        seams.replace_next_block_hasher(self._make_hasher)

    def add_request(self, request: Request) -> None:
        if self.span_hasher is None or request._block_hasher is not self.span_hasher:
            raise ConfigurationError("The span block hasher is not in place")
        if request.resumable or may_have_places(request, self.span_config):
            self.prepare(request)
            if request.minipic_chain:
                if request.resumable:
                    # Its prompt would grow behind the segments that were read. Never scheduled.
                    request.abort_immediately = True
                self._keep_in_context(request, request.minipic_chain.table)
        elif self.connector is not None:  # it may look at a request's hashes from now on
            self.prepare(request)
        super().add_request(request)

    def prepare(self, request: Request) -> None:
        """A request's turn comes: its prompt is read and hashed, unless it has been."""
        if request.block_hashes:
            return
        assert self.span_hasher is not None
        try:
            self.span_hasher.read(request)
        except Exception as error:
            # vLLM's front end, which would have refused it, never saw it. It ends with an error,
            # the engine does not.
            if not isinstance(error, MiniPICError):
                _log.exception("Request %s cannot be read", request.request_id)
            request.minipic_chain = False
            self.grammar_compile_error_reqs.add(request.request_id)
        request.update_block_hashes()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            chain = getattr(self.requests[new.req_id], "minipic_chain", None)
            if chain is not None:
                # So that the worker need not read the prompt again (see `worker_segments`).
                new.minipic_table = chain.table if chain else None
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self.grammar_compile_error_reqs:
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    def _keep_in_context(self, request: Request, table: SegmentTable) -> None:
        """Reserved ranges may lead past the model's positions though the tokens are few."""
        if table.generated_position > table.num_prompt_tokens:
            room = self.vllm_config.model_config.max_model_len - table.generated_position
            request.max_tokens = min(request.max_tokens, room)
            if room < 1:  # never scheduled
                request.abort_immediately = True

    def probe_cached_blocks(
        self,
        token_ids: list[int],
        sampling_params: Any,
        cache_salt: str | None,
        adapter: Any = None,
    ) -> list[bool]:
        """Which full blocks of a prompt the cache holds now. Reads only."""
        assert self.span_hasher is not None
        request = SimpleNamespace(
            prompt_token_ids=token_ids,
            all_token_ids=token_ids,
            num_tokens=len(token_ids),
            block_hashes=[],
            sampling_params=sampling_params,
            cache_salt=cache_salt,
            lora_request=adapter,
            mm_features=[],
            prompt_embeds=None,
            resumable=False,
        )
        self.span_hasher.read(request)
        return seams.cached_blocks(self, self.span_hasher(request))

    def _make_hasher(self, stock: Any, block_size: int, hash_function: Any) -> SpanBlockHasher:
        self.span_hasher = SpanBlockHasher(self.span_config, stock, block_size, hash_function)
        return self.span_hasher
