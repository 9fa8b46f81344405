"""The tokenizer that a client lays prompts out with: the server's own, or one proven equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.layout.tokenizer_digest import tokenizer_digest
from minipic_backend.models.cache import build_once, cache_dir
from minipic_backend.models.tokenizer import load_tokenizer

__all__ = ["check_tokenizer", "kept_folder", "local_model", "tokenizer_from_files"]


def local_model(name: str) -> str | None:
    """A model's folder on this machine; None where there is none by that name."""
    from minipic_backend.models import resolve_model

    found = Path(resolve_model(name, progress=False)).expanduser()
    return str(found) if found.is_dir() else None


def tokenizer_from_files(files: Mapping[str, str], digest: str) -> Any:
    """The tokenizer in a server's files, kept on this machine under its digest.

    Args:
        files: name → text, as the server's route gives them. Data only: code is not loaded.
        digest: what the tokenizer must have.
    """

    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    if wrong := [name for name in files if Path(name).name != name or name.endswith(".py")]:
        raise ConfigurationError(f"The server's tokenizer has files that are none: {wrong}")
    return load_tokenizer(str(build_once(kept_folder(digest), files, write)))


def kept_folder(digest: str) -> Path:
    """Where the tokenizer of that digest is kept, once it was fetched."""
    if not digest.isalnum():
        raise ConfigurationError(f"The server's tokenizer digest is none: {shown(digest)}")
    return cache_dir() / "tokenizers" / digest


def check_tokenizer(tokenizer: Any, name: str, digest: str) -> None:
    """Refuses a tokenizer that is not the server's.

    Raises:
        ConfigurationError: it differs in tokens or in the chat template.
    """
    if tokenizer_digest(tokenizer) != digest:
        raise ConfigurationError(
            f"The tokenizer or chat template of {name} is not the one that the server uses, so "
            "that prompts would be laid out wrongly. Take the files that the server has, or leave "
            "out tokenizer= (and model=, where that is a folder) to fetch the server's"
        )
