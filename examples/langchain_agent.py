"""An agent that looks documents up: what a tool finds becomes spans, shared by all conversations.

make setup && .venv/bin/python examples/langchain_agent.py
"""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_minipic import ChatMiniPIC
from langchain_minipic.middleware import SpanMiddleware

from minipic_backend.demo.corpus import load_passages
from minipic_backend.demo.retriever import PassageRetriever

QUESTIONS = ["What does the str.upper method return?", "And what does str.upper do?"]
RETRIEVER = PassageRetriever.over(load_passages(), k=3)


@tool(response_format="content_and_artifact")
def look_up(method: Literal["str.lower", "str.title", "str.upper"]) -> tuple[str, list[Document]]:
    """Look up a string method in Python's documentation."""
    documents = RETRIEVER.invoke(f"What does the {method} method return?")
    # The documents come along as the artifact: that is how ChatMiniPIC knows them.
    return "\n\n".join(document.page_content for document in documents), documents


@wrap_model_call
def lead(request: ModelRequest[Any], handler: Any) -> Any:
    """A model this small asks for no tool of its own accord, and loses sight of the question once
    it has read the documents. Larger ones need no such help."""
    if not isinstance(request.messages[-1], ToolMessage):
        return handler(request.override(tool_choice="any"))
    question = request.messages[0]
    return handler(request.override(messages=[*request.messages, question], tools=[]))


def main() -> None:
    with ChatMiniPIC(
        model="HuggingFaceTB/SmolLM2-135M-Instruct", temperature=0.0, max_tokens=48
    ) as llm:
        # Frame "none": the question stands in front of what a tool finds, and must not enter it.
        agent = create_agent(
            llm,
            [look_up],
            system_prompt="Answer in one short sentence.",
            middleware=[lead, SpanMiddleware(frame="none")],
        )
        for question in QUESTIONS:
            messages = agent.invoke({"messages": [HumanMessage(question)]})["messages"]
            print(question)
            print("   looks up:", messages[1].tool_calls[0]["args"])
            print("  ", messages[-1].content)
            print("  ", messages[-1].usage_metadata["input_token_details"])
        print(llm.explain(messages[:-1], frame="none"))


if __name__ == "__main__":
    main()
