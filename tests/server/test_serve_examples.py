"""The examples of clients run as they are, and `minipic doctor` finds the server well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from process import API_KEY, ServerProcess

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "MINIPIC_API_KEY": API_KEY},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["remote_engine", "openai_client", "anthropic_client"])
def test_example(server: ServerProcess, name: str) -> None:
    address = server.root if name == "anthropic_client" else server.base_url
    shown = run(f"examples/serve_{name}.py", address)
    cached = re.findall(r"(\d+) (?:of \d+ (?:tokens )?cached|tokens read)", shown)
    assert len(cached) == 2
    assert int(cached[1]) > 0  # the second time, the other way round


def test_doctor(server: ServerProcess) -> None:
    shown = run("-m", "minipic_backend.cli", "doctor", "--base-url", server.base_url)
    assert "another cache_salt shares nothing" in shown
    assert "tokens read from the cache" in shown
    assert "FAIL" not in shown
