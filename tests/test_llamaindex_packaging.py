"""`llama_index.llms.minipic` is a part of llama-index-core's namespace, installed either way."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ROOT / "integrations" / "llama_index"
CODE = """
import llama_index.core, llama_index.llms.minipic, minipic_backend
from llama_index.llms.minipic import MiniPIC
from llama_index.core.llms import LLM
assert issubclass(MiniPIC, LLM)
assert not hasattr(llama_index, "__file__") or llama_index.__file__ is None
print(llama_index.llms.minipic.__file__)
"""


def test_no_init_file_shadows_llama_index_core() -> None:
    assert not (OURS / "__init__.py").exists()
    assert not (OURS / "llms" / "__init__.py").exists()
    assert (OURS / "llms" / "minipic" / "py.typed").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip would, with what is installed here."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def test_the_wheel_holds_the_namespace_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "llama_index/llms/minipic/base.py" in names
    assert "llama_index/llms/minipic/py.typed" in names
    assert "llama_index/llms/minipic/testing/response_modes.py" in names
    assert not {"llama_index/__init__.py", "llama_index/llms/__init__.py"} & names


def imported_from(folder: Path, paths: list[Path]) -> Path:
    """Where the package comes from in a fresh interpreter that has `paths` besides its own."""
    lines = [f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}", CODE]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_the_wheel_merges_with_llama_index_core(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert imported_from(tmp_path, [site]).is_relative_to(site)


def test_an_editable_install_merges_with_llama_index_core(tmp_path: Path) -> None:
    """What it puts on `sys.path` is what pyproject says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = [ROOT / name for name in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    assert imported_from(tmp_path, folders).is_relative_to(OURS)


def test_metadata_as_integrations_of_llama_index_have_it() -> None:
    hub = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["llamahub"]
    assert hub["import_path"] == "llama_index.llms.minipic"
    assert "MiniPIC" in hub["class_authors"]
