"""A finished set once more as JSON lines: what SpecForge and speculators take as tokenized already.

Each shard becomes `jsonl/NAME.jsonl`, a line a sample with `input_ids` and `loss_mask` (0 and 1). SpecForge 0.2.0 reads
one such file (`data.prompts_path`; concatenate them), speculators 0.9.0 a file or the folder (`prepare-data --data`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from draftmill.contracts.errors import StorageError
from draftmill.progress import Progress
from draftmill.storage.cache import spool_folder
from draftmill.storage.local import no_room
from draftmill.storage.sets import open_set
from draftmill.tokenize.existing import shard_samples

FOLDER = "jsonl"


def write_jsonl(url: str) -> None:
    """Writes the files that the complete set at `url` lacks."""
    reader = open_set(url, "tokenize")
    progress = Progress(f"{url}/{FOLDER}", total=len(reader.inputs), unit="files")
    with spool_folder(reader.plan.hash) as spool:
        for shard in reader.inputs:
            name = f"{FOLDER}/{Path(shard.key).stem}.jsonl"
            if reader.store.size(name) is None:
                with _written(spool / "lines", reader.local(shard)) as lines:
                    reader.store.put(name, lines)
            progress.advance(1)


@contextmanager
def _written(file: Path, shard: Path) -> Iterator[Path]:
    """The shard's samples as lines in `file`, for a while; StorageError where there is no room for them."""
    try:
        with file.open("wb") as stream:
            stream.writelines(_lines(shard))
        yield file
    except StorageError:
        raise
    except OSError as error:
        raise no_room(error, file) from error
    finally:
        file.unlink(missing_ok=True)


def _lines(shard: Path) -> Iterator[bytes]:
    for sample in shard_samples(shard, shard.name):
        line = {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.astype(int).tolist()}
        yield msgspec.json.encode(line) + b"\n"
