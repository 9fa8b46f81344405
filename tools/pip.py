"""pip, run with a status line, a log, and failures that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.pythons import SetupError

__all__ = ["Pip"]

_NOISE = ("WARNING: Location", "Requirement already satisfied", "Looking in ")
_OFFLINE = (
    "Failed to establish a new connection", "NewConnectionError", "NameResolutionError",
    "Temporary failure in name resolution", "Network is unreachable", "Connection refused",
    "Read timed out", "ConnectTimeoutError", "ProxyError", "SSLError",
)  # fmt: skip
_VERSIONS = re.compile(r"^Available versions: (.*)$", re.MULTILINE)


class Pip:
    """The pip of one virtual environment.

    Args:
        python: the environment's interpreter.
        log: file that gets everything pip prints.
    """

    def __init__(self, python: Path, log: Path) -> None:
        self.python = python
        self.log = log

    def install(self, title: str, *requirements: str) -> None:
        """Raises SetupError where pip fails."""
        self._run(title, ["install", *requirements])

    def uninstall(self, *names: str) -> None:
        self._run("removing " + ", ".join(names), ["uninstall", "--yes", *names])

    def versions(self, name: str, python_version: tuple[int, int]) -> list[str]:
        """Versions of a package that pip can get for a Python, as its configuration stands.

        Raises:
            SetupError: none at all, which means that no index answers.
        """
        command = [str(self.python), "-m", "pip", "index", "versions", name]
        command += ["--python-version", ".".join(map(str, python_version))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = _VERSIONS.search(done.stdout)
        if found:
            return [version.strip() for version in found.group(1).split(",")]
        if "No matching distribution" in done.stdout and not _is_offline(done.stdout):
            return []
        with self.log.open("a", encoding="utf-8") as log:
            log.write(done.stdout)
        raise SetupError(self._explain("pip index versions " + name, done.stdout))

    def _run(self, title: str, arguments: Sequence[str]) -> None:
        command = [str(self.python), "-m", "pip", *arguments]
        environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
        started, lines = time.monotonic(), []
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns - 1
        print(f"  {title} ...", end="\n" if is_terminal else " ", flush=True)
        with self.log.open("a", encoding="utf-8") as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment,
        ) as process:  # fmt: skip
            log.write("$ " + " ".join(command) + "\n")
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if line.startswith(_NOISE):
                    continue
                lines.append(line)
                if is_terminal:
                    print("\r\033[K" + ("    " + line.strip())[:width], end="", flush=True)
        if is_terminal:
            print("\r\033[K", end="")
        if process.returncode:
            print("failed")
            raise SetupError(self._explain(title, "".join(lines)))
        print(f"{'    ' if is_terminal else ''}done, {time.monotonic() - started:.0f} s")

    def _explain(self, title: str, output: str) -> str:
        if _is_offline(output):
            advice = (
                "pip could not reach its package index. Check the network, the proxy "
                "(HTTPS_PROXY), and pip's configuration (pip config list)."
            )
        elif "No space left" in output:
            advice = "The disk is full: the environment takes 4 GB, or 7 GB with CUDA's libraries."
        else:
            advice = "The last lines of pip:\n" + "\n".join(output.strip().split("\n")[-8:])
        return f"{title} failed. {advice}\nAll of pip's output: {self.log}"


def _is_offline(output: str) -> bool:
    return any(sign in output for sign in _OFFLINE)
