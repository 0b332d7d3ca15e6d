"""tokenize: completions -> samples. No torch, no transformers.

In: a completions set, or any folder or file of .jsonl(.gz|.zst). Out: Arrow shards (contracts/samples.py) with their
records, state.json and dataset_info.json (so that datasets.load_from_disk reads them), and a card.
One pure function makes a part (part.py); pool.py runs it in workers; the gate judges every part, then the whole.
"""
