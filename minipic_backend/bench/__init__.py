"""Benchmarks: what `minipic bench` runs. Speed is told as a ratio to stock vLLM in the same run."""
