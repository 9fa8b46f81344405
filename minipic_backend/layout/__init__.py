"""From a prompt to token ids: rendering, tokens, markers, primer, padding, late documents.

Start at `prompt_layout.Layout`. Neither torch nor vLLM in here.
"""
