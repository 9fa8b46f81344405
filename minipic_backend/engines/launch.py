"""From our options to vLLM's, and a started engine or an error that says what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from minipic_backend.config import CONFIG_KEY
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.engines.threads import wait_passively
from minipic_backend.errors import ConfigurationError, EngineStartError, ModelNotFoundError, shown
from minipic_backend.models import resolve_model

__all__ = ["DEFAULT_CPU_KV_CACHE_GIB", "engine_arguments", "start_driver", "without_vllm"]

DEFAULT_CPU_KV_CACHE_GIB = 2.0
"""vLLM's default takes nearly all memory of the machine: too much for a guest in a process."""

_NOT_FOUND = (
    "is not a local folder",
    "Repository Not Found",
    "couldn't connect",
    "Cannot find",
    "Invalid repository ID",
    "LocalEntryNotFoundError",
    "Can't load",
    "offline mode",
    "client has been closed",
)


def engine_arguments(
    model: str,
    spans: Mapping[str, Any],
    kv_cache_gib: float | None,
    further: Mapping[str, Any],
    *,
    verbose: bool,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`.

    Args:
        model: a folder or a hub name.
        spans: our part of `additional_config`.
        kv_cache_gib: GiB for the KV cache; None for the default.
        further: the caller's own arguments for vLLM; they win over our defaults.
        verbose: let vLLM log below warnings. Read by vLLM once, when it is first imported.

    Raises:
        ModelNotFoundError: `model` looks like a path, and nothing is there.
        ConfigurationError: an argument that vLLM does not know.
    """
    _check_path(model)
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    wait_passively()
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise without_vllm(error) from error

    known = set(EngineArgs.__dataclass_fields__)
    if unknown := sorted(set(further) - known):
        near = get_close_matches(unknown[0], sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"Neither MiniPIC nor vLLM's EngineArgs knows {', '.join(unknown)}{hint}"
        )
    arguments: dict[str, Any] = {"model": resolve_model(model)}
    if current_platform.is_cpu():
        # A compiled model needs a C++ compiler, and minutes.
        arguments["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            kv_cache_gib = kv_cache_gib or DEFAULT_CPU_KV_CACHE_GIB
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    arguments.update(further)
    additional = dict(arguments.get("additional_config") or {})
    additional[CONFIG_KEY] = {**spans, **additional.get(CONFIG_KEY, {})}
    arguments["additional_config"] = additional
    return arguments


def without_vllm(error: ImportError) -> EngineStartError:
    """What to raise where vLLM cannot be imported."""
    return EngineStartError(
        f"vLLM cannot be imported ({error}). Install it (`pip install 'minipic[cpu]'` or "
        "`'minipic[cuda]'`), or ask `minipic doctor` what is wrong"
    )


def start_driver(
    model: str, arguments: Mapping[str, Any], *, separate_process: bool
) -> EngineDriver:
    """A running engine.

    Raises:
        ModelNotFoundError, EngineStartError, or what the plugin refuses with.
    """
    from minipic_backend.plugin import register

    # vLLM calls it too, through its entry point, where the package is installed.
    register()
    try:
        return EngineDriver(arguments, separate_process=separate_process)
    except EngineStartError as error:
        text = f"{error} {error.__cause__!r}"
        if any(hint in text for hint in _NOT_FOUND):
            raise ModelNotFoundError(
                f"No model {shown(model)}: no such folder, and the Hugging Face hub does not give "
                f"it ({_first_line(error.__cause__)})"
            ) from error
        raise


def _check_path(model: str) -> None:
    path = Path(model).expanduser()
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if looks_like_path and not path.exists():
        raise ModelNotFoundError(f"No model at {model}: no such folder")
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelNotFoundError(f"No model at {model}: the folder has no config.json")


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if error and str(error).strip() else repr(error)
