"""The serving protocol (completions with token ids, as vLLM speaks it), its client, and engines we start. No torch.

in    token ids of rendered prompts
out   the target's own tokens and why each answer ended
"""
