"""Host memory behind the cache of `step_rig`, as a connector of vLLM's; loads take a step."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

__all__ = ["HostConnector"]


class HostConnector(KVConnectorBase_V1):
    """The scheduler's side. Remembers the hashes of all blocks that were computed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.size: int = vllm_config.cache_config.block_size
        self.on_host: set[bytes] = set()
        self.loads: dict[str, tuple[list[int], list[bytes]]] = {}
        """Loads to be done by the worker: block ids, and what goes there."""
        self.num_loaded = 0
        self._requests: dict[str, Any] = {}

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = num_computed_tokens // self.size
        count = 0
        for block_hash in request.block_hashes[first : request.num_tokens // self.size]:
            if bytes(block_hash) not in self.on_host:
                break
            count += 1
        return count * self.size, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            count = num_external_tokens // self.size
            first = len([b for b in blocks.blocks[0] if b.block_hash is not None])
            hashes = [bytes(h) for h in request.block_hashes[first : first + count]]
            self.loads[request.request_id] = ids[first : first + count], hashes
            self.num_loaded += count

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            done = (request.num_computed_tokens + count) // self.size
            self.on_host.update(bytes(h) for h in request.block_hashes[:done])
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return False, None

    # The worker's side is the rig's.
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
