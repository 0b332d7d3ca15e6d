"""Lines of JSON -> columns of samples: the inside of a tokenizing worker, without files, parts or processes.

A `RowMaker` is built once from a small picklable `RowMakerSpec` and then makes one chunk of lines after the other; what
comes out depends on the lines and the spec alone. A row that cannot be used is listed with its reason, never raised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import Dropped
from draftmill.contracts.rows import Row, RowError, read_row
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.figures import PartStats, Tally, fingerprint
from draftmill.tokenize.samples import Sample, open_sample_maker

Line = tuple[int, bytes]
"""A line's number in its file (from 1) and its JSON."""


@dataclass(frozen=True)
class RowMakerSpec:
    """What samples depend on beside their rows: small and picklable, for it travels to every worker."""

    tokenizer: Path
    turns: Turns
    max_tokens: int


@dataclass(frozen=True)
class RowBatch:
    """The samples of one chunk of lines as columns, in the order of the lines; tokens never are Python objects."""

    sample_ids: list[str]
    """`row`, or `row#turn` where one row makes several samples."""
    lengths: NDArray[np.int32]
    """Tokens of each sample."""
    input_ids: NDArray[np.int32]
    """Flat."""
    loss_mask: NDArray[np.bool_]
    """Flat."""
    truncated: NDArray[np.bool_]
    """Of each sample."""
    fingerprints: NDArray[np.uint64]
    """Of each sample, by its token ids alone: figures.repeats counts those that a whole part has twice."""
    row_ids: list[str | None]
    """Of each line, in order: the row's id, None where the line has none that can be read."""
    rows_in: int
    dropped: list[Dropped]
    stats: PartStats


class RowMaker:
    """Makes samples of rows for one target under one policy; owns the tokenizer and the template."""

    def __init__(self, spec: RowMakerSpec) -> None:
        """Opens the tokenizer; InputError where it is missing, or the borders of its template cannot be found."""
        self.spec = spec
        self._samples_of = open_sample_maker(spec.tokenizer, spec.turns, spec.max_tokens)

    def make(self, lines: Sequence[Line], file: str) -> RowBatch:
        """The samples of a chunk of the lines of `file`."""
        samples: list[Sample] = []
        dropped: list[Dropped] = []
        row_ids: list[str | None] = []
        for number, line in lines:
            row: Row | None = None
            try:
                row = read_row(line)
                row_ids.append(row.id)
                samples += self._samples_of(row)
            except RowError as error:
                row_id = row.id if row else error.row_id
                if row is None:
                    row_ids.append(row_id)
                dropped.append(Dropped(file=file, line=number, id=row_id, reason=error.reason))
        return _batch(samples, row_ids, dropped)


def _batch(samples: Sequence[Sample], row_ids: list[str | None], dropped: list[Dropped]) -> RowBatch:
    tally = Tally()
    for sample in samples:
        tally.add(sample.input_ids, sample.loss_mask, truncated=sample.truncated)
    return RowBatch(
        sample_ids=[sample.id for sample in samples],
        lengths=np.array([len(sample.input_ids) for sample in samples], np.int32),
        input_ids=np.concatenate([np.empty(0, np.int32), *(sample.input_ids for sample in samples)]),
        loss_mask=np.concatenate([np.empty(0, np.bool_), *(sample.loss_mask for sample in samples)]),
        truncated=np.array([sample.truncated for sample in samples], np.bool_),
        fingerprints=np.array([fingerprint(sample.input_ids) for sample in samples], np.uint64),
        row_ids=row_ids,
        rows_in=len(row_ids),
        dropped=dropped,
        stats=tally.figures(rows=len(row_ids), dropped=len(dropped)),
    )
