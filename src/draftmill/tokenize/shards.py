"""Samples on disk: Arrow IPC streams of fixed-size batches, and the two files datasets.load_from_disk wants beside.

Bytes depend on the samples alone: one schema, one batch size, no compression (so that readers can map the file).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill.contracts.cards import PartRecord, canonical_json
from draftmill.contracts.samples import SAMPLE_SCHEMA
from draftmill.tokenize.samples import Sample

# About 2 million values of the longest usual samples: far from Arrow's 32-bit list offsets.
BATCH_SAMPLES = 1_000


def write_shard(path: Path, rows: Iterable[list[Sample]]) -> int:
    """Writes the samples of each row, in order, as one Arrow IPC stream; returns the number of rows."""
    num_rows = 0
    batch: list[Sample] = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as writer:
        for samples in rows:
            num_rows += 1
            for sample in samples:
                batch.append(sample)
                if len(batch) == BATCH_SAMPLES:
                    writer.write_batch(_record_batch(batch))
                    batch.clear()
        if batch:
            writer.write_batch(_record_batch(batch))
    return num_rows


def _record_batch(samples: list[Sample]) -> pa.RecordBatch:
    ends = np.cumsum([0, *(len(sample.input_ids) for sample in samples)])
    offsets = pa.array(ends.astype(np.int32))
    ids = np.concatenate([sample.input_ids for sample in samples])
    mask = np.concatenate([sample.loss_mask for sample in samples])
    columns = [
        pa.array([sample.id for sample in samples], pa.string()),
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(mask)),
        pa.array([sample.truncated for sample in samples], pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SAMPLE_SCHEMA)


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
