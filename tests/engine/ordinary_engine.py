"""A script: what vLLM makes of ordinary prompts; `test_ordinary_prompts.py` runs it.

ordinary_engine.py MODEL OUT.json (absent | disabled | enabled)…
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

BLOCK_SIZE = 32
PROMPTS = (
    "The capital of France is",
    "Generators are functions that yield values one at a time. " * 12,
    "Generators are functions that yield values one at a time. " * 12 + "So what is a list?",
)


def observe(model: str, mode: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if mode != "absent":
        from minipic_backend.plugin import register

        register()
    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            block_size=BLOCK_SIZE,
            enforce_eager=True,
            max_model_len=1024,
            kv_cache_memory_bytes=2**27,
            additional_config={"minipic": {}} if mode == "enabled" else {},
        )
    )
    core = llm.engine_core.engine_core
    hashes: dict[str, list[str]] = {}
    add_request = core.scheduler.add_request

    def keep_request(request: Any) -> None:
        requests.append(request)
        add_request(request)

    requests: list[Any] = []
    core.scheduler.add_request = keep_request
    params = SamplingParams(temperature=0.0, max_tokens=34, logprobs=5, ignore_eos=True)
    tokens, logprobs, cached = [], [], []
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, params)
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished:
                    (completion,) = output.outputs
                    tokens.append(list(completion.token_ids))
                    cached.append(output.num_cached_tokens)
                    logprobs.append(
                        [{str(k): v.logprob for k, v in row.items()} for row in completion.logprobs]
                    )
        hashes[prompt] = [block_hash.hex() for block_hash in requests[-1].block_hashes]
    worker = core.model_executor.driver_worker.worker
    layer = next(iter(worker.model_runner.compilation_config.static_forward_context.values()))
    parts = [core.scheduler, worker, worker.model_runner, layer.impl]
    parts.append(worker.model_runner.attn_groups[0][0].get_metadata_builder(0))
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "cached_tokens": cached,
        "hashes": list(hashes.values()),
        "parts": [type(part).__qualname__ for part in parts],
        "imported": any(name.startswith("minipic") for name in sys.modules),
        "patched": hasattr(EngineArgs.create_engine_config, "minipic_stock"),
    }


if __name__ == "__main__":
    _, model, out, *modes = sys.argv
    Path(out).write_text(json.dumps({mode: observe(model, mode) for mode in modes}))
