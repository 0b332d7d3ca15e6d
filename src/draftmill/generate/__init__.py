"""generate: prompts -> the target's own answers. No torch: the target is served, or runs in engines of its own.

In: files of prompts (.jsonl, .jsonl.gz, .jsonl.zst, .parquet). Out: a completions set (contracts/rows.py) whose answers
carry the engine's token ids where it gives them. survey.py cuts the prompts into parts and intake.py reads them,
conversation.py holds one row turn by turn, flow.py asks served engines and batches.py our own, spool.py keeps what is
done, closing.py makes a part of it, and the gate judges every part, then the whole.
"""
