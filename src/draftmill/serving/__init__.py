"""Engines, served by others or started by us, and what is said to them. No torch.

in    chat turns for many served engines (fleet.py), or token ids of rendered prompts for our own (client.py)
out   the target's own answers, with its token ids where the engine gives them, and why each ended
"""
