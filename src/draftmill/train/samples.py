"""The tokenized set as the trainer reads it: memory-mapped Arrow parts in the plan's order, opened when needed.

A sample's index counts from the first part of the plan on, so it is known as soon as the parts before it are.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.storage.growing import GrowingSet
from draftmill.storage.shards import Shards

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation turn, T tokens."""

    id: str
    input_ids: IntArray
    loss_mask: BoolArray

    def cut(self, length: int) -> "Sample":
        """Its first `length` tokens."""
        return Sample(self.id, self.input_ids[:length], self.loss_mask[:length])


@dataclass(frozen=True)
class SampleBatch:
    """Consecutive samples laid end to end: sample i of the batch owns tokens bounds[i] .. bounds[i + 1]."""

    first: int
    """The index of sample 0 of the batch within its part."""
    file: str
    ids: list[str]
    input_ids: IntArray
    loss_mask: BoolArray
    bounds: IntArray


class _OpenPart:
    """A part that is mapped into memory."""

    def __init__(self, file: str, path: Path) -> None:
        self.file = file
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            self.batches = [batch for batch in stream if batch.num_rows]
        self.starts = [0, *accumulate(batch.num_rows for batch in self.batches)]

    def sample(self, index: int) -> Sample:
        which = bisect_right(self.starts, index) - 1
        row = self.batches[which].slice(index - self.starts[which], 1)
        batch = _flat(row, index, self.file)
        return Sample(batch.ids[0], batch.input_ids, batch.loss_mask)


class SampleSet:
    """All samples of a tokenized set, in the order of its parts. A part that is not made yet is waited for."""

    def __init__(self, parts: GrowingSet, cache_bytes: int = 0) -> None:
        self.parts = parts
        self._shards = Shards(parts, cache_bytes)
        self._starts = [0]
        self._open: dict[int, _OpenPart] = {}

    def __getitem__(self, index: int) -> Sample:
        while index >= self._starts[-1]:
            self.start_of(len(self._starts))
        part = bisect_right(self._starts, index) - 1
        return self._opened(part).sample(index - self._starts[part])

    def documents(self, indices: Sequence[int], lengths: Sequence[int]) -> list[Sample]:
        """The samples of a row, each up to the length that is trained on."""
        return [self[index].cut(length) for index, length in zip(indices, lengths, strict=True)]

    def start_of(self, part: int) -> int:
        """The index of the part's first sample; of the number of parts: how many samples there are."""
        while len(self._starts) <= part:
            self._starts.append(self._starts[-1] + self.parts.part(len(self._starts) - 1).rows)
        return self._starts[part]

    def batches(self, part: int) -> Iterator[SampleBatch]:
        """A part from start to end, a record batch at a time."""
        opened = self._opened(part)
        for first, batch in zip(opened.starts, opened.batches, strict=False):
            yield _flat(batch, first, opened.file)

    def refuse_endless_fetching(self) -> None:
        """RecipeError where samples of the whole set are drawn in turn, and not all of it may be kept here."""
        size = sum(self.parts.part(i).file.size for i in range(self.parts.num_parts))
        if not self.parts.is_local and size > self._shards.limit_bytes:
            raise RecipeError(
                f"from the second epoch on samples are drawn from all of {self.parts.store.url}, whose {size:,} bytes "
                f"are more than --data-cache-bytes {self._shards.limit_bytes:,}: every part would be fetched again and "
                "again. Give it as much, or train for one epoch; checkpoints stay"
            )

    def _opened(self, index: int) -> _OpenPart:
        if index not in self._open:
            part = self.parts.part(index)
            opened = self._shards.read(part.file, partial(_OpenPart, part.file.key))
            if opened.starts[-1] != part.rows:
                raise StorageError(
                    f"{self.parts.store.url}/{part.file.key} holds {opened.starts[-1]:,} samples, but its record says "
                    f"{part.rows:,}: remove it and run what made it again"
                )
            self._open[index] = opened
            gone = [i for i in self._open if not self._shards.holds(self.parts.part(i).file)]
            self._open = {i: part for i, part in self._open.items() if i not in gone}
            self._shards.fetch_ahead(index + 1)
        return self._open[index]


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
