"""A chatbot with history: the documents of earlier turns stay in the cache.

make setup && .venv/bin/python examples/langchain_history.py
"""

from __future__ import annotations

from langchain_core.messages import BaseMessage
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate

from minipic_backend.demo.corpus import load_passages
from minipic_backend.demo.retriever import PassageRetriever

TURNS = [
    "What does the str.upper method return?",
    "What does the str.lower method return?",
    "Which of the two did I ask about first?",
]


def main() -> None:
    retriever = PassageRetriever.over(load_passages(), k=3)
    prompt = SpanPromptTemplate.from_messages(
        [
            ("system", "Answer from the documents, in one short sentence."),
            ("placeholder", "{history}"),
            ("human", "{context}\n\nQuestion: {question}"),
        ]
    )
    history: list[BaseMessage] = []
    with ChatMiniPIC(
        model="HuggingFaceTB/SmolLM2-135M-Instruct", temperature=0.0, max_tokens=32
    ) as llm:
        for question in TURNS:
            value = prompt.invoke(
                {"history": history, "context": retriever.invoke(question), "question": question}
            )
            answer = llm.invoke(value)
            # The turn goes into the history as it was sent, marks and all.
            history += [value.to_messages()[-1], answer]
            usage = answer.usage_metadata
            assert usage is not None
            print(question)
            print("  ", answer.content)
            print("  ", usage["input_tokens"], "prompt tokens,", usage["input_token_details"])
        print(llm.explain(value))


if __name__ == "__main__":
    main()
