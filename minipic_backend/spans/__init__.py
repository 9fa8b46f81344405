"""What the token ids of a prompt mean: segments, patches, block hashes. Start at `segments`.

Client, scheduler and worker each read it from the token ids. Neither torch nor vLLM in here.
"""
