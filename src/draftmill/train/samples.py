"""The tokenized set as the trainer reads it: memory-mapped Arrow parts, any sample by its index, and whole batches."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from draftmill.contracts.errors import InputError
from draftmill.storage.sets import SetReader

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation turn, T tokens."""

    id: str
    input_ids: IntArray
    loss_mask: BoolArray

    def cut(self, max_tokens: int) -> "Sample":
        """Its first `max_tokens` tokens."""
        return Sample(self.id, self.input_ids[:max_tokens], self.loss_mask[:max_tokens])


@dataclass(frozen=True)
class SampleBatch:
    """Consecutive samples laid end to end: sample i of the batch owns tokens bounds[i] .. bounds[i + 1]."""

    first: int
    file: str
    ids: list[str]
    input_ids: IntArray
    loss_mask: BoolArray
    bounds: IntArray


class SampleSet:
    """All samples of a tokenized set, in the order of its parts."""

    def __init__(self, reader: SetReader) -> None:
        self._batches: list[tuple[str, pa.RecordBatch]] = []
        for file in reader.inputs:
            with pa.memory_map(str(reader.local(file))) as source, pa.ipc.open_stream(source) as stream:
                self._batches += [(file.key, batch) for batch in stream if batch.num_rows]
        self._starts = [0, *accumulate(batch.num_rows for _, batch in self._batches)]
        if not self._batches:
            raise InputError(f"{reader.store.url} holds no samples: tokenize again and look at its card")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        which = bisect_right(self._starts, index) - 1
        row = self._batches[which][1].slice(index - self._starts[which], 1)
        batch = _flat(row, index, self._batches[which][0])
        return Sample(batch.ids[0], batch.input_ids, batch.loss_mask)

    def batches(self) -> Iterator[SampleBatch]:
        """The whole set, a record batch at a time."""
        for first, (file, batch) in zip(self._starts, self._batches, strict=False):
            yield _flat(batch, first, file)


def _flat(batch: pa.RecordBatch, first: int, file: str) -> SampleBatch:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    bounds = ids.offsets.to_numpy()
    return SampleBatch(
        first=first,
        file=file,
        ids=batch.column("id").to_pylist(),
        input_ids=ids.flatten().to_numpy(),
        loss_mask=mask.flatten().to_numpy(zero_copy_only=False),
        bounds=bounds - bounds[0],
    )
