"""Layouts beyond retrieval: other things that come again in prompts, as spans.

Each function makes an ordinary `Prompt`, which any technique lays out. What varies from call to
call (a question, the latest turn) is text behind the spans; what stays is worth a span of its own
only where its neighbours change: a part that always has the same text in front of it is a hit as it
is, in vLLM's own prefix cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minipic_backend.errors import PromptError
from minipic_backend.prompt import Message, Part, Prompt, Span, Text

__all__ = ["few_shot", "old_turns", "repository", "sections", "split_sections", "tool_schemas"]

_HEADING = re.compile(r"^(#{1,6}) +(.+?)\s*#*$", re.MULTILINE)


def few_shot(
    instruction: str, examples: Iterable[tuple[str, str]], question: str, *, form: str = "{}\n{}"
) -> Prompt:
    """Worked examples, chosen anew for each question, in any order.

    Args:
        instruction: the system message.
        examples: question and answer of each.
        question: to be answered.
        form: how an example is written out, with two {}.
    """
    spans: list[Part] = [Span(form.format(asked, answer)) for asked, answer in examples]
    return _chat(instruction, [*spans, Text(question)])


def tool_schemas(instruction: str, tools: Sequence[Mapping[str, Any]], request: str) -> Prompt:
    """Tools, a different choice of them in each prompt.

    For models that call tools by their own template, `Prompt.chat(tools=...)` is the way; there, a
    change of one tool makes the whole prompt cold.

    Args:
        instruction: the system message: what a call looks like.
        tools: JSON schemas; the keys of each are sorted, so that equal tools have equal tokens.
        request: what the user wants.
    """
    spans: list[Part] = [
        Span(json.dumps(tool, sort_keys=True, ensure_ascii=False), id=_tool_name(tool))
        for tool in tools
    ]
    return _chat(instruction, [*spans, Text(request)])


def repository(
    instruction: str, files: Mapping[str, str] | Iterable[Path], question: str
) -> Prompt:
    """Files of a repository: after an edit only the edited file is computed again.

    Args:
        instruction: the system message.
        files: path to content, or paths to read. In the order of the prompt.
        question: about them.
    """
    contents = files if isinstance(files, Mapping) else {str(p): _read(p) for p in files}
    spans: list[Part] = [
        Span(f"File {path}:\n{content}", id=path) for path, content in contents.items()
    ]
    return _chat(instruction, [*spans, Text(question)])


def sections(instruction: str, documents: Iterable[str], question: str) -> Prompt:
    """Sections of long documents as spans: an edition that changes one keeps the others.

    Args:
        instruction: the system message.
        documents: Markdown; see `split_sections`.
        question: about them.
    """
    spans: list[Part] = [Span(one) for document in documents for one in split_sections(document)]
    return _chat(instruction, [*spans, Text(question)])


def split_sections(document: str) -> list[str]:
    """The sections of a Markdown text, each under all headings that it stands under, so that it
    says by itself what it is about. A text without headings is one section."""
    found = list(_HEADING.finditer(document))
    starts = [match.start() for match in found]
    pieces = [document[: starts[0]] if starts else document]
    path: list[tuple[int, str]] = []
    ends = [*starts[1:], len(document)]
    for match, end in zip(found, ends[: len(found)], strict=True):
        level, title = len(match[1]), match[2]
        path = [*(one for one in path if one[0] < level), (level, title)]
        body = document[match.end() : end].strip()
        if body:
            pieces.append(" > ".join(title for _, title in path) + "\n" + body)
    return [piece.strip() for piece in pieces if piece.strip()]


def old_turns(
    system: str, turns: Sequence[tuple[str, str]], latest: str, *, keep: int = 2
) -> Prompt:
    """A long chat of which any old turns may be left out: each is a span in one transcript.

    Plain chats need nothing of the kind: their old turns are a prefix, hence hits. This is for
    chats that are cut to a window, or whose old turns are picked by relevance: then what stays is
    still a hit, though what stood in front of it is gone.

    Args:
        system: the system message.
        turns: user's and assistant's texts, the oldest first, as many as are to be shown.
        latest: what the user says now.
        keep: turns at the end that stay messages of the chat, in full context.
    """
    if keep < 0:
        raise PromptError(f"keep={keep}: a number from 0")
    first_kept = max(len(turns) - keep, 0)
    old, kept = turns[:first_kept], turns[first_kept:]
    spans: list[Part] = [Span(f"User: {asked}\nAssistant: {said}") for asked, said in old]
    messages = [Message("system", system)]
    for asked, said in (*kept, (latest, None)):
        parts: list[Part] = [*spans, Text(asked)]
        spans = []
        messages.append(Message("user", parts))
        if said is not None:
            messages.append(Message("assistant", said))
    return Prompt.chat(messages)


def _chat(system: str, parts: list[Part]) -> Prompt:
    return Prompt.chat([Message("system", system), Message("user", parts)])


def _tool_name(tool: Mapping[str, Any]) -> str | None:
    name = tool.get("name") or tool.get("function", {}).get("name")
    return None if name is None else str(name)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error
