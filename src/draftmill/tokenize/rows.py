"""Lines of JSON -> columns of samples: the inside of a tokenizing worker, without files, parts or processes.

A `RowMaker` is built once from a small picklable `RowMakerSpec` and then makes one chunk of lines after the other; what
comes out depends on the lines and the spec alone. A row that cannot be used is listed with its reason, never raised.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.chat.borders import find_borders
from draftmill.chat.chat import TOKENIZER_FILE, open_chat
from draftmill.chat.skeletons import Skeletons
from draftmill.chat.turns import RenderedTurns, TurnFinder
from draftmill.contracts.cards import Dropped
from draftmill.contracts.rows import Row, RowError, read_row
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.encoders import Encoded, Encoder, ReferenceEncoder, open_encoder
from draftmill.tokenize.figures import PartStats, count, fingerprint, holding
from draftmill.tokenize.samples import Sample, Unencoded, Unfolded, Unfolder, cut, holds_reasoning, why_nothing

# Of rows in this many one is checked: which, is a matter of its id.
CHECKED_EVERY = 500

log = logging.getLogger(__name__)

Line = tuple[int, bytes]
"""A line's number in its file (from 1) and its JSON."""


@dataclass(frozen=True)
class RowMakerSpec:
    """What samples depend on beside their rows: small and picklable, for it travels to every worker."""

    tokenizer: Path
    turns: Turns
    max_tokens: int
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: date | None = None
    """What the template takes for today."""
    mask_id: int | None = None
    """Samples that hold this token are counted."""


@dataclass(frozen=True)
class RowBatch:
    """The samples of one chunk of lines as columns, in the order of the lines; tokens never are Python objects."""

    sample_ids: list[str]
    """As samples.py names them."""
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
    dropped: list[Dropped]
    stats: PartStats


class _Way(NamedTuple):
    """How rows become ids: fast, or by the template and the reference alone."""

    unfold: Unfolder
    encoder: Encoder


class _Read(NamedTuple):
    """A row that could be read and rendered."""

    line: int
    row: Row
    made: Unfolded


@dataclass
class _Chunk:
    """What is known of a chunk's rows while its samples are made."""

    file: str
    row_ids: list[str | None] = field(default_factory=list)
    rows: list[_Read] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    thinking: int = 0
    answers: int = 0
    unsupervised: int = 0
    differing: int = 0

    def drop(self, line: int, row_id: str | None, reason: str) -> None:
        self.dropped.append(Dropped(file=self.file, line=line, id=row_id, reason=reason))

    def note(self, read: _Read) -> None:
        """Counts what there is to count of a row that stays."""
        self.thinking += holds_reasoning(read.row)
        self.answers += read.made.answers
        self.unsupervised += read.made.unsupervised


class RowMaker:
    """Makes samples of rows for one target under one policy; owns the tokenizer and the template.

    One row in CHECKED_EVERY is made a second time, by the template and the reference tokenizer alone. Where that comes
    out differently the row is shown, and counted in the batch's stats: whoever makes a shard then makes all of it anew,
    `careful`.
    """

    def __init__(self, spec: RowMakerSpec) -> None:
        """Opens the tokenizer; InputError where it is missing, or the borders of its template cannot be found."""
        self.spec = spec
        chat = open_chat(spec.tokenizer, spec.template_date)
        finder = TurnFinder(chat, find_borders(chat, spec.template_kwargs))
        self.fast = _Way(self._unfolder(Skeletons(finder)), open_encoder(chat, spec.tokenizer / TOKENIZER_FILE))
        self.careful = _Way(self._unfolder(finder), ReferenceEncoder(chat))

    def _unfolder(self, render: Skeletons | TurnFinder) -> Unfolder:
        return Unfolder(render, self.spec.turns, self.spec.template_kwargs)

    def make(self, lines: Sequence[Line], file: str, *, careful: bool = False) -> RowBatch:
        """The samples of a chunk of the lines of `file`."""
        chunk, way = _Chunk(file), self.careful if careful else self.fast
        for number, line in lines:
            _read(chunk, number, line, way.unfold)
        return _batch(list(self._finished(chunk, way)), chunk, self.spec.mask_id)

    def _finished(self, chunk: _Chunk, way: _Way) -> Iterator[Sample]:
        """The samples that can be learnt from; rows that have none are listed."""
        encoded_rows = _encoded([read.made.samples for read in chunk.rows], way.encoder)
        for read, encoded in zip(chunk.rows, encoded_rows, strict=True):
            if way is self.fast and zlib.crc32(read.row.id.encode()) % CHECKED_EVERY == 0:
                self._check(chunk, read, encoded)
            samples = [cut(s.id, ids, self.spec.max_tokens) for s, ids in zip(read.made.samples, encoded, strict=True)]
            kept = [sample for sample in samples if sample.has_anchor]
            yield from kept
            if kept:
                chunk.note(read)
            else:
                chunk.drop(read.line, read.row.id, why_nothing(encoded))

    def _check(self, chunk: _Chunk, read: _Read, encoded: Sequence[Encoded]) -> None:
        """Makes a row again, carefully; shows and counts it where that gives other samples."""
        try:
            samples = self.careful.unfold(read.row).samples
        except RowError:
            samples = []
        true = _encoded([samples], self.careful.encoder)[0]
        made, wanted = zip(read.made.samples, encoded, strict=True), zip(samples, true, strict=True)
        if any(
            a is None or b is None or a[0].id != b[0].id or not a[1].equals(b[1]) for a, b in zip_longest(made, wanted)
        ):
            chunk.differing += 1
            log.warning(
                "%s line %d (row %s) comes out differently from the fast engine than from the reference: %s",
                *(chunk.file, read.line, read.row.id, read.row.messages),
            )


def _read(chunk: _Chunk, number: int, line: bytes, unfold: Unfolder) -> None:
    """Says which samples the row on a line makes; lists it where it cannot make any."""
    row: Row | None = None
    try:
        row = read_row(line)
        chunk.rows.append(_Read(number, row, unfold(row)))
    except RowError as error:
        chunk.drop(number, row.id if row else error.row_id, error.reason)
    chunk.row_ids.append(row.id if row else chunk.dropped[-1].id)


def _encoded(rows: Sequence[Sequence[Unencoded]], encoder: Encoder) -> list[list[Encoded]]:
    """Ids and mask of each row's samples; all that is text is encoded at once."""
    contents = [sample.content for samples in rows for sample in samples]
    encoded = iter(encoder.encode([content for content in contents if isinstance(content, RenderedTurns)]))
    return [[s.content if isinstance(s.content, Encoded) else next(encoded) for s in samples] for samples in rows]


def _batch(samples: Sequence[Sample], chunk: _Chunk, mask_id: int | None) -> RowBatch:
    lengths = np.array([len(sample.input_ids) for sample in samples], np.int32)
    supervised = np.array([np.count_nonzero(sample.loss_mask) for sample in samples], np.int32)
    truncated = np.array([sample.truncated for sample in samples], np.bool_)
    input_ids = np.concatenate([np.empty(0, np.int32), *(sample.input_ids for sample in samples)])
    rows = {
        "rows": len(chunk.row_ids),
        "dropped": len(chunk.dropped),
        "thinking_rows": chunk.thinking,
        "answers": chunk.answers,
        "answers_unsupervised": chunk.unsupervised,
        "differing": chunk.differing,
        "with_mask": holding(input_ids, lengths, mask_id),
    }
    return RowBatch(
        sample_ids=[sample.id for sample in samples],
        lengths=lengths,
        input_ids=input_ids,
        loss_mask=np.concatenate([np.empty(0, np.bool_), *(sample.loss_mask for sample in samples)]),
        truncated=truncated,
        fingerprints=np.array([fingerprint(sample.input_ids) for sample in samples], np.uint64),
        row_ids=chunk.row_ids,
        dropped=sorted(chunk.dropped, key=lambda drop: drop.line),
        stats=count(lengths, supervised, truncated, **rows),
    )
