"""Attention over segments: kernels, their plans, and the plain specification beside them.

Nothing here knows vLLM. Read `naive` first (what must come out), then `rows` (what a kernel is
told). On a CPU, `gathered` computes it. On CUDA: `work` (how it is shared among thread blocks),
`span_local`, `unrotated`, `compact` (three ways to compute it) and `dispatch` (which one, when).
"""
