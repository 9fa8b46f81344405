"""Tools and reasoning, for every integration.

    plan = plan_answer(engine.tokenizer, tools=tools, tool_choice="any")
    prompt = Prompt.chat(messages, tools=plan.tools)
    result = engine.generate(prompt, **plan.options)
    plan.parser().parse(result.text, result.token_ids).tool_calls

Streams: one `plan.parser()`, `feed` with each chunk's text and tokens, `finish` at the end.
"""

from __future__ import annotations

from minipic_backend.tools.answer import Answer, AnswerDelta, ToolCall, ToolCallDelta
from minipic_backend.tools.choice import ToolChoice, resolve_tool_choice
from minipic_backend.tools.parser import AnswerFormat, AnswerParser, TextParser
from minipic_backend.tools.plan import AnswerPlan, plan_answer
from minipic_backend.tools.rendering import spell_out_tools

__all__ = [
    "Answer",
    "AnswerDelta",
    "AnswerFormat",
    "AnswerParser",
    "AnswerPlan",
    "TextParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "plan_answer",
    "resolve_tool_choice",
    "spell_out_tools",
]
