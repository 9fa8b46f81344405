"""What the GPU tests compare with."""

from __future__ import annotations

import pytest
import torch
from reference import Reference

from minipic_backend.models import ensure_smollm2


@pytest.fixture(scope="module")
def reference() -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        ensure_smollm2(progress=False), dtype=torch.float32, attn_implementation="eager"
    )
    return Reference(model.eval())
