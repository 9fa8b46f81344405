"""What `minipic demo` runs: a LangChain RAG chain over Python's own language reference."""
