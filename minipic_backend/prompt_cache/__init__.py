"""Prompt Cache: prompts made of a schema's modules, at positions that the schema reserves.

    schema = Schema("trip", [Module("plan", ["A trip of ", Parameter("days", 4), " days."])])
    prompt = schema.prompt("Where to surf?", {"plan": {"days": "three"}})
    engine.generate(prompt, technique="prompt_cache")

After Gim et al., "Prompt Cache: Modular Attention Reuse for Low-Latency Inference" (MLSys 2024).
Here, modules are spans and arguments are patches: docs/techniques.md says what differs.
"""

from minipic_backend.prompt_cache.pml import read_pml_prompt, read_pml_schema
from minipic_backend.prompt_cache.schema import Module, Parameter, Schema, SchemaPrompt, Union

__all__ = [
    "Module",
    "Parameter",
    "Schema",
    "SchemaPrompt",
    "Union",
    "read_pml_prompt",
    "read_pml_schema",
]
