"""A tokenized set as `draftmill tokenize` publishes it, made of samples given by a test. Needs no torch."""

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from draftmill.contracts.cards import PartRecord, Plan, PlannedPart, make_card, part_name
from draftmill.contracts.errors import DataGateError
from draftmill.contracts.samples import SAMPLE_SCHEMA
from draftmill.storage.growing import GrowingSet, open_growing
from draftmill.storage.patience import Patiently
from draftmill.storage.sets import open_set_writer
from draftmill.storage.store import sha256_of
from draftmill.storage.waiting import Waiting

GivenSample = tuple[str, Sequence[int], Sequence[bool]]


class Producer:
    """Makes a tokenized set of given samples (id, ids, loss mask) a part at a time, in any order; the plan at once."""

    def __init__(self, url: str | Path, samples: Sequence[GivenSample], tokenizer_hash: str, num_parts: int) -> None:
        self._samples = samples
        self._tokenizer_hash = tokenizer_hash
        self._records: dict[int, PartRecord] = {}
        names = [part_name(i) for i in range(num_parts)]
        parts = tuple(PlannedPart(name=name, inputs=(f"{name}.jsonl",)) for name in names)
        plan = Plan(room="tokenize", recipe={"tokenizer_hash": tokenizer_hash}, inputs=(), parts=parts)
        self._writer = open_set_writer([str(url)], plan)

    def publish(self, *indices: int) -> None:
        """Makes these parts, in this order."""
        plan, samples = self._writer.plan, self._samples
        for i in indices:
            chunk = samples[i * len(samples) // len(plan.parts) : (i + 1) * len(samples) // len(plan.parts)]
            name, data = plan.parts[i].name, _arrow(chunk)
            self._records[i] = PartRecord(
                name=name,
                file=f"{name}.arrow",
                rows_in=len(chunk),
                rows=len(chunk),
                tokens=sum(len(ids) for _, ids, _ in chunk),
                bytes=len(data),
                sha256=sha256_of(data),
                plan=plan.hash,
            )
            self._writer.publish(self._records[i], data)

    def refuse(self, reason: str) -> None:
        """Ends as a maker does whose gate refuses the set."""
        with suppress(DataGateError), self._writer.telling_refusal():
            raise DataGateError(reason)

    def finish(self) -> None:
        """Makes the parts that are missing, and the card."""
        self.publish(*(i for i in range(len(self._writer.plan.parts)) if i not in self._records))
        records = tuple(record for _, record in sorted(self._records.items()))
        content = {"tokenizer_hash": self._tokenizer_hash}
        self._writer.finish(make_card("tokenize", self._writer.plan, records, content, {}))


def write_samples(url: str | Path, samples: Sequence[GivenSample], tokenizer_hash: str, num_parts: int = 2) -> str:
    """Publishes the samples in `num_parts` parts with their card; returns the URL."""
    Producer(url, samples, tokenizer_hash, num_parts).finish()
    return str(url)


def open_samples(url: str | Path, limit_s: float = 0) -> GrowingSet:
    """A tokenized set, whose next part is waited for `limit_s` seconds."""
    return open_growing(str(url), "tokenize", Waiting(limit_s), Patiently(0))


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
