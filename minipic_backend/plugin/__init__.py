"""The vLLM plugin: spans on stock vLLM, switched on by `additional_config={"minipic": {…}}`.

vLLM calls `register` in every process (entry point group `vllm.general_plugins`). It installs one
hook that does nothing until a configuration asks for spans.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes vLLM understand `additional_config["minipic"]`. May be called any number of times."""
    from minipic_backend.plugin import seams
    from minipic_backend.plugin.enable import enable_spans

    seams.on_create_engine_config(enable_spans)
