"""A finished set once more as JSON lines: what SpecForge and speculators take as tokenized already.

Each shard becomes `jsonl/NAME.jsonl`, a line a sample with `input_ids` and `loss_mask` (0 and 1). SpecForge 0.2.0 reads
one such file (`data.prompts_path`; concatenate them), speculators 0.9.0 a file or the folder (`prepare-data --data`).
"""

import tempfile
from pathlib import Path

import msgspec

from draftmill.progress import Progress
from draftmill.storage.sets import open_set
from draftmill.tokenize.existing import shard_samples

FOLDER = "jsonl"


def write_jsonl(url: str) -> None:
    """Writes the files that the complete set at `url` lacks."""
    reader = open_set(url, "tokenize")
    progress = Progress(f"{url}/{FOLDER}", total=len(reader.inputs), unit="files")
    for shard in reader.inputs:
        name = f"{FOLDER}/{Path(shard.key).stem}.jsonl"
        if reader.store.size(name) is None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "lines"
                _write(file, reader.local(shard))
                reader.store.put(name, file)
        progress.advance(1)


def _write(file: Path, shard: Path) -> None:
    with file.open("wb") as stream:
        for sample in shard_samples(shard, shard.name):
            line = {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.astype(int).tolist()}
            stream.write(msgspec.json.encode(line) + b"\n")
