"""A prompt from JSON messages, as chat clients write them (see `minipic_backend.json_messages`):

a list of them, or an object with "messages" and, as the chat template wants them, "tools".
"""

from __future__ import annotations

import json
from typing import Any

from minipic_backend.errors import PromptError
from minipic_backend.json_messages import read_messages
from minipic_backend.prompt import Prompt

__all__ = ["parse_prompt"]


def parse_prompt(text: str) -> Prompt:
    """The prompt in a JSON text.

    Raises:
        PromptError: no JSON, or not messages; says where.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PromptError(f"not JSON: {error}") from error
    tools: Any = ()
    if isinstance(data, dict):
        tools = data.get("tools") or ()
        data = data.get("messages")
    if not isinstance(data, list) or not data:
        raise PromptError('expected a list of messages, or an object with "messages"')
    return Prompt.chat(read_messages(data), tools=tools)
