"""A shard is a plain Arrow stream: what pyarrow itself would write of the samples, readable by it and by datasets."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from draftmill.contracts.samples import SAMPLE_SCHEMA
from draftmill.storage.store import sha256_of
from draftmill.tokenize.figures import PartStats
from draftmill.tokenize.rows import RowBatch
from draftmill.tokenize.shards import BATCH_SAMPLES, ShardWriter


def _batch(seed: int, num_samples: int, longest: int = 40) -> RowBatch:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, num_samples).astype(np.int32)
    tokens = int(lengths.sum())
    return RowBatch(
        sample_ids=[f"row-{seed}-{i}é" for i in range(num_samples)],
        lengths=lengths,
        input_ids=random.integers(0, 250_000, tokens).astype(np.int32),
        loss_mask=random.random(tokens) < 0.5,
        truncated=random.random(num_samples) < 0.1,
        fingerprints=np.zeros(num_samples, np.uint64),
        row_ids=[None] * num_samples,
        dropped=[],
        stats=PartStats(),
    )


def _as_lists(batches: list[RowBatch]) -> dict[str, list]:
    columns: dict[str, list] = {name: [] for name in SAMPLE_SCHEMA.names}
    for batch in (batch for batch in batches if batch.sample_ids):
        ends = np.cumsum(batch.lengths)[:-1]
        columns["id"] += batch.sample_ids
        columns["input_ids"] += [ids.tolist() for ids in np.split(batch.input_ids, ends)]
        columns["loss_mask"] += [mask.tolist() for mask in np.split(batch.loss_mask, ends)]
        columns["truncated"] += batch.truncated.tolist()
    return columns


def _write(path: Path, batches: list[RowBatch]) -> ShardWriter:
    with ShardWriter(path) as shard:
        for batch in batches:
            shard.add(batch)
    return shard


def test_what_is_written_is_read_back(tmp_path: Path):
    batches = [_batch(0, 700), _batch(1, 301), _batch(2, 0), _batch(3, 1)]
    shard = _write(tmp_path / "a.arrow", batches)
    with pa.memory_map(str(shard.path)) as source, pa.ipc.open_stream(source) as stream:
        read = list(stream)
    assert [batch.num_rows for batch in read] == [1001, 1] and BATCH_SAMPLES == 1000
    table = pa.Table.from_batches(read)
    table.validate(full=True)
    assert table.schema == SAMPLE_SCHEMA and table.to_pydict() == _as_lists(batches)
    assert (shard.bytes, shard.sha256) == (shard.path.stat().st_size, sha256_of(shard.path))


def test_the_bytes_are_those_of_pyarrow_s_own_writer(tmp_path: Path):
    batches = [_batch(0, 600), _batch(1, 500), _batch(2, 3)]
    shard = _write(tmp_path / "a.arrow", batches)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as stream:
        for group in (batches[:2], batches[2:]):
            stream.write_batch(pa.RecordBatch.from_pydict(_as_lists(group), schema=SAMPLE_SCHEMA))
    assert shard.path.read_bytes() == (tmp_path / "b.arrow").read_bytes()


def test_a_shard_without_a_sample_is_a_whole_stream(tmp_path: Path):
    path = _write(tmp_path / "a.arrow", [_batch(0, 0)]).path
    assert pa.ipc.open_stream(path.read_bytes()).read_all().num_rows == 0


def test_a_token_takes_little_more_than_four_bytes(tmp_path: Path):
    batch = _batch(0, 1000, longest=4000)
    shard = _write(tmp_path / "a.arrow", [batch])
    assert 4.125 < shard.bytes / len(batch.input_ids) < 4.15


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_shards import _batch, _write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
_write(Path({path!r}), [_batch(0, 900), _batch(1, 900)])
"""


def test_a_full_disk_is_named_and_leaves_no_half_shard(tmp_path: Path):
    assert resource.RLIMIT_FSIZE  # a limit on the size of files stands for a disk without room
    script = FULL.format(tests=str(Path(__file__).parent), path=str(tmp_path / "a.arrow"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "StorageError" in done.stderr and "a.arrow cannot be written: File too large; free some space" in done.stderr
    assert not (tmp_path / "a.arrow").exists()


def test_a_failure_inside_leaves_no_half_shard(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path / "a.arrow") as shard:
        shard.add(_batch(0, 10))
        raise ZeroDivisionError
    assert not (tmp_path / "a.arrow").exists()
