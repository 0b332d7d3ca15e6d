"""A tokenized set as `draftmill tokenize` publishes it, made of samples given by a test. Needs no torch."""

import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from draftmill.contracts.cards import PartRecord, Plan, PlannedPart, make_card, part_name
from draftmill.contracts.samples import SAMPLE_SCHEMA
from draftmill.storage.sets import open_set_writer
from draftmill.storage.store import sha256_of

GivenSample = tuple[str, Sequence[int], Sequence[bool]]


def write_samples(url: str | Path, samples: Sequence[GivenSample], tokenizer_hash: str, num_parts: int = 2) -> str:
    """Publishes the samples (id, ids, loss mask) in `num_parts` parts with their card; returns the URL."""
    names = [part_name(i) for i in range(num_parts)]
    parts = tuple(PlannedPart(name=name, inputs=(f"{name}.jsonl",)) for name in names)
    plan = Plan(room="tokenize", recipe={}, inputs=(), parts=parts)
    writer = open_set_writer([str(url)], plan)
    records = []
    for i, name in enumerate(names):
        chunk = samples[i * len(samples) // num_parts : (i + 1) * len(samples) // num_parts]
        data = _arrow(chunk)
        record = PartRecord(
            name=name,
            file=f"{name}.arrow",
            rows_in=len(chunk),
            rows=len(chunk),
            tokens=sum(len(ids) for _, ids, _ in chunk),
            bytes=len(data),
            sha256=sha256_of(data),
            plan=plan.hash,
        )
        writer.publish(record, data)
        records.append(record)
    writer.finish(make_card("tokenize", plan, tuple(records), {"tokenizer_hash": tokenizer_hash}, {}))
    return str(url)


def _arrow(samples: Sequence[GivenSample]) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as stream:
        for start in range(0, len(samples), 3):  # several record batches a part, as a real set has
            ids, tokens, masks = zip(*samples[start : start + 3], strict=True)
            columns = [list(ids), [list(t) for t in tokens], [list(m) for m in masks], [False] * len(ids)]
            stream.write_batch(
                pa.record_batch(
                    [pa.array(c, type=f.type) for c, f in zip(columns, SAMPLE_SCHEMA, strict=True)],
                    schema=SAMPLE_SCHEMA,
                )
            )
    return sink.getvalue()
