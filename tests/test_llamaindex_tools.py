"""Tools, agents, workflows and structured answers, over a fake engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.types import PydanticProgramMode
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index.llms.minipic import MiniPIC, SpanRetrieverTool
from llama_index.llms.minipic.testing import NODES, GivenNodes
from pydantic import BaseModel

from minipic_backend import AnswerError, Prompt
from minipic_backend.testing import FakeEngine

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"input": "red box"}}\n</tool_call>'


class Box(BaseModel):
    """A box."""

    colour: str
    room: int


def look_up(input: str) -> str:
    """Looks something up."""
    return f"Found: {input}."


TOOL = FunctionTool.from_defaults(look_up)


def agents_engine(answer: str = "It holds coins.") -> FakeEngine:
    """Calls the tool until there is a result, then answers."""

    def respond(prompt: Prompt) -> str:
        found = any(message.role == "tool" for message in prompt.messages)
        return answer if found else CALL

    return FakeEngine(respond)


# ---- calls ----------------------------------------------------------------------------------


def test_a_call_is_found_in_answers_and_streams() -> None:
    llm = MiniPIC(engine=FakeEngine(f"Let me see.\n{CALL}"))
    streamed = list(llm.stream_chat_with_tools([TOOL], "Find it."))
    asynchronous = asyncio.run(llm.achat_with_tools([TOOL], "Find it."))
    for response in (llm.chat_with_tools([TOOL], "Find it."), streamed[-1], asynchronous):
        assert response.message.content == "Let me see."
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("look_up", {"input": "red box"})
        assert call.tool_id
        assert response.message.additional_kwargs["tool_calls"][0]["function"]["name"] == "look_up"
    assert not any("tool_call>" in (r.message.content or "") for r in streamed)


def test_tools_go_to_the_chat_template() -> None:
    engine = FakeEngine(CALL)
    MiniPIC(engine=engine).chat_with_tools([TOOL], "Find it.", chat_history=[ChatMessage("Hi.")])
    (prompt,) = engine.prompts
    assert prompt.tools[0]["function"]["name"] == "look_up"
    assert [message.role for message in prompt.messages] == ["user"]


@pytest.mark.parametrize("choice", [{"tool_required": True}, {"tool_choice": "look_up"}])
def test_forced_calls_are_held_to_the_schema(choice: dict[str, Any]) -> None:
    engine = FakeEngine(CALL)
    llm = MiniPIC(engine=engine)
    response = llm.chat_with_tools([TOOL], "Find it.", **choice)
    assert "look_up" in json.dumps(engine.calls[0].options["structured_outputs"])
    (call,) = llm.get_tool_calls_from_response(response)
    assert call.tool_kwargs == {"input": "red box"}
    assert not response.message.content


def test_strict_calls() -> None:
    engine = FakeEngine(CALL)
    llm = MiniPIC(engine=engine)
    llm.chat_with_tools([TOOL], "Find it.")
    llm.chat_with_tools([TOOL], "Find it.", strict=True)
    assert ["structured_outputs" in call.options for call in engine.calls] == [False, True]


def test_one_call_where_calls_in_parallel_are_not_allowed() -> None:
    llm = MiniPIC(engine=FakeEngine(CALL + CALL))
    for parallel, count in ((False, 1), (True, 2)):
        response = llm.chat_with_tools([TOOL], "x", allow_parallel_tool_calls=parallel)
        assert len(llm.get_tool_calls_from_response(response)) == count
        assert len(response.message.additional_kwargs["tool_calls"]) == count


def test_no_call() -> None:
    llm = MiniPIC(engine=FakeEngine("No."))
    response = llm.chat_with_tools([TOOL], "x")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(AnswerError, match="tool_required"):
        llm.get_tool_calls_from_response(response)


def test_a_call_under_way_has_what_there_is() -> None:
    llm = MiniPIC(engine=FakeEngine(CALL.replace("red box", "a rather long thing to look for")))
    seen = [
        call.tool_kwargs
        for response in llm.stream_chat_with_tools([TOOL], "x")
        for call in llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    ]
    assert seen[-1] == {"input": "a rather long thing to look for"}
    assert seen[0] == {}
    assert {"input": None} in seen  # LlamaIndex's reading of a string without an end


def test_a_call_that_was_cut_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    llm = MiniPIC(engine=FakeEngine(CALL))
    for max_tokens, warned in ((100, False), (6, True)):
        response = llm.chat_with_tools([TOOL], "x", max_tokens=max_tokens)
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_kwargs == {"input": "red box"}) is not warned
        assert ("max_tokens" in caplog.text) is warned


def test_predict_and_call() -> None:
    llm = MiniPIC(engine=FakeEngine(CALL))
    assert llm.predict_and_call([TOOL], "x").response == "Found: red box."
    assert asyncio.run(llm.apredict_and_call([TOOL], "x")).response == "Found: red box."


def test_reasoning_is_a_block_of_its_own() -> None:
    from llama_index.core.base.llms.types import ThinkingBlock

    llm = MiniPIC(engine=FakeEngine("<think>Hm, well.</think>Yes."), reasoning_parser="think")
    streamed = list(llm.stream_chat([ChatMessage("x")]))
    for response in (llm.chat([ChatMessage("x")]), streamed[-1]):
        assert response.message.content == "Yes."
        (thought,) = [b for b in response.message.blocks if isinstance(b, ThinkingBlock)]
        assert thought.content == "Hm, well."
    deltas = [r.additional_kwargs.get("thinking_delta", "") for r in streamed]
    assert "".join(deltas) == "Hm, well."


# ---- agents ---------------------------------------------------------------------------------


def run(agent: Any, question: str = "What does the red box hold?") -> Any:
    async def main() -> Any:
        return await agent.run(user_msg=question)

    return asyncio.run(main())


@pytest.mark.parametrize("streaming", [True, False])
def test_function_agent_with_nodes_from_a_tool(streaming: bool) -> None:
    engine = agents_engine()
    tool = SpanRetrieverTool.from_defaults(GivenNodes(), name="look_up", description="Looks up.")
    agent = FunctionAgent(tools=[tool], llm=MiniPIC(engine=engine), streaming=streaming)
    output = run(agent)
    assert str(output) == "It holds coins."
    assert output.tool_calls[0].tool_output.raw_output == list(NODES)
    last = engine.prompts[-1]
    assert [(s.id, s.rank) for s in last.spans] == [("node-0", 0), ("node-1", 1), ("node-2", 2)]
    assert [m.role for m in last.messages][-3:] == ["user", "assistant", "tool"]
    assert "Box 0" in output.tool_calls[0].tool_output.content


def test_function_agent_with_a_query_engine() -> None:
    """The query engine's own prompt has the spans; the agent reads its answer."""

    def respond(prompt: Prompt) -> str:
        if prompt.spans:
            return "Coins."
        return "It holds coins." if any(m.role == "tool" for m in prompt.messages) else CALL

    engine = FakeEngine(respond)
    llm = MiniPIC(engine=engine)
    query_engine = RetrieverQueryEngine.from_args(GivenNodes(), llm=llm)
    tool = QueryEngineTool.from_defaults(query_engine, name="look_up", description="Looks up.")
    for make in (
        lambda: FunctionAgent(tools=[tool], llm=llm),
        lambda: AgentWorkflow.from_tools_or_functions([tool], llm=llm),
    ):
        first = len(engine.prompts)
        assert str(run(make())) == "It holds coins."
        assert [len(prompt.spans) for prompt in engine.prompts[first:]] == [0, 3, 0]


def test_react_agent() -> None:
    def respond(prompt: Prompt) -> str:
        text = "".join(part.text for message in prompt.messages for part in message.parts)
        if "Observation: " in text.rpartition("red box hold?")[2]:
            return "Thought: I know.\nAnswer: It holds coins."
        return 'Thought: I look.\nAction: look_up\nAction Input: {"input": "red box"}'

    llm = MiniPIC(engine=FakeEngine(respond))
    assert str(run(ReActAgent(tools=[TOOL], llm=llm))) == "It holds coins."


def test_workflow() -> None:
    class Ask(Workflow):
        @step
        async def ask(self, event: StartEvent) -> StopEvent:
            response = await llm.acomplete(event.question)
            pieces = [one.delta async for one in await llm.astream_complete(event.question)]
            return StopEvent(result=(response.text, "".join(piece or "" for piece in pieces)))

    llm = MiniPIC(engine=FakeEngine("Coins, I think."))

    async def main() -> Any:
        return await Ask().run(question="What?")

    assert asyncio.run(main()) == ("Coins, I think.", "Coins, I think.")


# ---- structured answers ---------------------------------------------------------------------

BOX = Box(colour="red", room=11)
PROMPT = PromptTemplate("Which box? {hint}")


def test_structured_predict() -> None:
    engine = FakeEngine(BOX.model_dump_json())
    llm = MiniPIC(engine=engine)

    async def astream() -> list[Any]:
        stream = await llm.astream_structured_predict(Box, PROMPT, hint="The red one.")
        return [piece async for piece in stream]

    answers = [
        llm.structured_predict(Box, PROMPT, hint="The red one."),
        asyncio.run(llm.astructured_predict(Box, PROMPT, hint="The red one.")),
        list(llm.stream_structured_predict(Box, PROMPT, hint="The red one."))[-1],
        asyncio.run(astream())[-1],
    ]
    assert answers == [BOX] * 4
    for call in engine.calls:
        assert call.options["structured_outputs"] == {"json": Box.model_json_schema()}
        text = call.prompt.messages[-1].parts[-1].text
        assert text.startswith("Which box? The red one.\n")
        assert json.dumps(Box.model_json_schema()) in text


def test_structured_llm() -> None:
    llm = MiniPIC(engine=FakeEngine(BOX.model_dump_json())).as_structured_llm(Box)
    assert llm.complete("Which?").raw == BOX
    assert llm.chat([ChatMessage("Which?")]).raw == BOX
    assert asyncio.run(llm.acomplete("Which?")).raw == BOX
    assert list(llm.stream_chat([ChatMessage("Which?")]))[-1].raw == BOX


def test_an_answer_cut_off_says_so() -> None:
    llm = MiniPIC(engine=FakeEngine(BOX.model_dump_json(indent=1)), max_tokens=2)
    with pytest.raises(AnswerError, match="max_tokens"):
        llm.structured_predict(Box, PROMPT, hint="")


def test_llamaindexs_own_ways_to_structure() -> None:
    """By a tool call, or by text."""
    engine = FakeEngine(BOX.model_dump_json())
    for mode in (PydanticProgramMode.FUNCTION, PydanticProgramMode.LLM):
        llm = MiniPIC(engine=engine, pydantic_program_mode=mode)
        assert llm.structured_predict(Box, PROMPT, hint="") == BOX
    assert "structured_outputs" in engine.calls[0].options
    assert "structured_outputs" not in engine.calls[1].options


def test_filtering_synthesizers_keep_nodes_whole() -> None:
    """They fill templates by a program of their own."""
    from llama_index.core.response_synthesizers import get_response_synthesizer

    engine = FakeEngine('{"query_satisfied": true, "answer": "Coins."}')
    llm = MiniPIC(engine=engine)
    for streaming in (False, True):
        synthesizer = get_response_synthesizer(
            llm=llm,
            prompt_helper=llm.prompt_helper,
            structured_answer_filtering=True,
            streaming=streaming,
        )
        answer = synthesizer.synthesize("What?", list(NODES))
        text = "".join(answer.response_gen) if streaming else str(answer)  # type: ignore[union-attr]
        assert text == "Coins."
        assert len(engine.prompts[-1].spans) == len(NODES)
