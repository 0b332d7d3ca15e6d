"""generate: prompts -> the target's own answers. No torch: the target runs in engine processes of its own.

In: .jsonl files of prompts. Out: a completions set (contracts/rows.py), whose answers carry the engine's token ids.
prompts.py reads and cuts into parts, conversation.py holds one row turn by turn, batches.py asks the engines,
part.py closes a part, and the gate judges every part, then the whole.
"""
