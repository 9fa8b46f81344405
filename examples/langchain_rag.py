"""A RAG chain over the Python language reference, on the embedded engine.

make setup && .venv/bin/python examples/langchain_rag.py
"""

from __future__ import annotations

from langchain_core.runnables import RunnablePassthrough
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate

from minipic_backend.demo.corpus import load_passages
from minipic_backend.demo.retriever import PassageRetriever

QUESTIONS = ["What does the str.upper method return?", "What does the str.lower method return?"]


def main() -> None:
    retriever = PassageRetriever.over(load_passages())
    llm = ChatMiniPIC(model="HuggingFaceTB/SmolLM2-135M-Instruct", temperature=0.0, max_tokens=48)
    prompt = SpanPromptTemplate.from_messages(
        [
            ("system", "Answer the question from the documents, in one short sentence."),
            ("human", "{context}\n\nQuestion: {question}"),
        ]
    )
    inputs = {"context": retriever, "question": RunnablePassthrough()}
    chain = inputs | prompt | llm
    with llm:
        for question in QUESTIONS:
            message = chain.invoke(question)
            usage = message.usage_metadata
            assert usage is not None
            print(question)
            print("  ", message.content)
            print("  ", usage["input_tokens"], "prompt tokens,", usage["input_token_details"])
        print((inputs | prompt | llm.explain).invoke(QUESTIONS[0]))


if __name__ == "__main__":
    main()
