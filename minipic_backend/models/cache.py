"""The user's cache folder, and folders that appear in it whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["build_once", "cache_dir"]


def cache_dir() -> Path:
    """Where converted models live: `$MINIPIC_CACHE`, or the platform's cache folder.

    Not created here.
    """
    if own := os.environ.get("MINIPIC_CACHE"):
        return Path(own).expanduser().absolute()
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "minipic"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "minipic"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is to be ignored.
    return (Path(base) if os.path.isabs(base) else home / ".cache") / "minipic"


def build_once(target: Path, files: Iterable[str], build: Callable[[Path], None]) -> Path:
    """`target`, built by `build(folder)` unless all of `files` are there already.

    The folder is built beside its place and renamed into it, so that nobody ever sees half a
    folder. Two processes at once both build; the first rename wins, the other is dropped.
    """
    files = tuple(files)
    if _is_complete(target, files):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(scratch)
        if missing := [name for name in files if not (scratch / name).is_file()]:
            raise RuntimeError(f"the build of {target.name} left out {', '.join(missing)}")
        scratch.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from its other users
        _move_into_place(scratch, target, files)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _move_into_place(scratch: Path, target: Path, files: tuple[str, ...]) -> None:
    for _ in range(2):
        try:
            scratch.rename(target)
            return
        except OSError:
            if _is_complete(target, files):  # somebody else was first
                return
            if not target.is_dir():
                raise
            shutil.rmtree(target, ignore_errors=True)  # damaged: a file was deleted by hand
    raise OSError(f"cannot put {target} in place: remove it and try again")


def _is_complete(target: Path, files: tuple[str, ...]) -> bool:
    return all((target / name).is_file() for name in files)
