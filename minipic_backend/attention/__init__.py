"""Attention over spans. Nothing here knows vLLM."""
