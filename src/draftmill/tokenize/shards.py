"""Samples on disk: Arrow IPC streams written straight from the columns, and what datasets.load_from_disk wants beside.

Bytes depend on the samples alone: one schema, batches closed by the number of samples, no compression (so that readers
can map the file).
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.contracts.cards import PartRecord, canonical_json
from draftmill.contracts.samples import SAMPLE_SCHEMA
from draftmill.storage.local import no_room
from draftmill.tokenize.rows import RowBatch

# About 2 million values of usual samples: far from Arrow's 32-bit list offsets, and little to read for one sample.
BATCH_SAMPLES = 1_000
_MAX_VALUES = (1 << 31) - 1
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ShardWriter:
    """One shard in the making; hashes what it writes. StorageError where the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._waiting: list[RowBatch] = []

    def __enter__(self) -> "ShardWriter":
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise no_room(error, self.path) from error
        self._write(SAMPLE_SCHEMA.serialize())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if error is None:
                self._flush()
                self._write(_END_OF_STREAM)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            self._file.close()
        if error is not None:
            self.path.unlink()

    @property
    def sha256(self) -> str:
        """Of the bytes written so far, 64 hex digits."""
        return self._digest.hexdigest()

    def add(self, batch: RowBatch) -> None:
        """Appends the samples of one chunk."""
        self._waiting.append(batch)
        if sum(len(waiting.sample_ids) for waiting in self._waiting) >= BATCH_SAMPLES:
            self._flush()

    def _flush(self) -> None:
        batches, self._waiting = [batch for batch in self._waiting if batch.sample_ids], []
        if batches:
            self._write(record_batch(batches).serialize())

    def _write(self, data: pa.Buffer | bytes) -> None:
        self._digest.update(data)
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise no_room(error, self.path) from error
        self.bytes += len(data)


def record_batch(batches: Sequence[RowBatch]) -> pa.RecordBatch:
    """The samples of some chunks as one batch over their own memory: tokens never become Python objects."""
    lengths = _joined([batch.lengths for batch in batches])
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    assert ends[-1] <= _MAX_VALUES, "a chunk of lines is megabytes, not gigatokens"
    offsets = pa.py_buffer(ends.astype(np.int32))
    ids = pa.py_buffer(_joined([batch.input_ids for batch in batches]))
    assert ids.size == 4 * ends[-1], "token ids are 32-bit numbers"
    values = pa.Array.from_buffers(pa.int32(), int(ends[-1]), [None, ids])
    mask = _bools(_joined([batch.loss_mask for batch in batches]))
    columns = [
        pa.array([sample_id for batch in batches for sample_id in batch.sample_ids], pa.string()),
        pa.Array.from_buffers(pa.list_(pa.int32()), len(lengths), [None, offsets], children=[values]),
        pa.Array.from_buffers(pa.list_(pa.bool_()), len(lengths), [None, offsets], children=[mask]),
        _bools(_joined([batch.truncated for batch in batches])),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SAMPLE_SCHEMA)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def _bools(values: NDArray[np.bool_]) -> pa.Array:
    """Arrow keeps one bit a value, the first in the lowest."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(np.packbits(values, bitorder="little"))])


def datasets_files(records: Iterable[PartRecord], fingerprint: str) -> dict[str, bytes]:
    """`state.json` and `dataset_info.json` of a set."""
    state = {
        "_data_files": [{"filename": record.file} for record in records],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {
        "citation": "",
        "description": "",
        "features": {field.name: _feature(field.type) for field in SAMPLE_SCHEMA},
        "homepage": "",
        "license": "",
    }
    return {"state.json": canonical_json(state), "dataset_info.json": canonical_json(info)}


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"_type": "List", "feature": _feature(kind.value_type)}
    return {"_type": "Value", "dtype": str(kind)}
