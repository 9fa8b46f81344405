"""What langchain_minipic offers, and what importing it must not cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import langchain_minipic


def test_public_names() -> None:
    assert langchain_minipic.__all__ == [
        "ChatMiniPIC",
        "MiniPIC",
        "SpanDocumentPrompt",
        "SpanPromptTemplate",
        "Unranked",
        "WarmingRetriever",
        "example_documents",
        "index_and_warm",
        "register_provider",
        "span_block",
        "span_blocks",
    ]
    assert all(getattr(langchain_minipic, name) for name in langchain_minipic.__all__)
    assert (Path(langchain_minipic.__file__).parent / "py.typed").is_file()


def test_importing_and_making_a_model_loads_no_engine_and_is_silent() -> None:
    code = (
        "import sys, langchain_minipic as m; m.ChatMiniPIC(model='m'); m.MiniPIC(model='m');"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
