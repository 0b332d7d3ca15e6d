"""The first pass over the prompts: what is there, which rows repeat others, and which lines make which part.

Every file is streamed once. 41 bytes a row are kept while reading (digests of id and content) and five afterwards, so
that a million rows need no more memory than they must.
"""

import hashlib
import logging
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import Dropped, InputFile, part_name
from draftmill.contracts.errors import InputError
from draftmill.contracts.split import is_in_split
from draftmill.generate.prompts import Prompt, Reading
from draftmill.settings.generate import GenerateSettings
from draftmill.storage.row_files import RowFile

logger = logging.getLogger(__name__)

REPEATED_ID = "id of an earlier row"
REPEATED_CONTENT = "content of an earlier row"

# What is known of a row, as bits.
IN_SPLIT, IS_PROMPT, SAME_ID, SAME_CONTENT = 1, 2, 4, 8
DIGEST_BYTES = 16
_TOLD_EVERY_ROWS = 200_000
_MOST_TURNS = 0xFFFF  # counted for progress alone


@dataclass(frozen=True)
class Stretch:
    """Lines `first..last` (inclusive, from 1) of file number `file`; the row at `first` is number `row` of all rows."""

    file: int
    first: int
    last: int
    row: int


@dataclass(frozen=True)
class Span:
    """The lines of one part: `part_rows` rows of the split, and those of the other split between them."""

    name: str
    stretches: tuple[Stretch, ...]
    digest: bytes
    """Of the part's own lines, so that a file that changed since is noticed."""
    num_prompts: int
    """Prompts of the part, repeats left out."""
    num_asked: int
    """Those of them that the target is asked for."""


@dataclass(frozen=True)
class Survey:
    """All rows of the inputs; `marks` holds the bits of each, `crcs` the CRC-32 of its line."""

    files: tuple[RowFile, ...]
    rows_of_file: tuple[int, ...]
    marks: NDArray[np.uint8]
    crcs: NDArray[np.uint32]
    spans: tuple[Span, ...]

    @property
    def inputs(self) -> tuple[InputFile, ...]:
        """The files as a plan names them."""
        return tuple(file.file for file in self.files)

    @property
    def num_rows(self) -> int:
        """Rows of the split, those that are no prompts included."""
        return int(np.count_nonzero(self.marks & IN_SPLIT))

    @property
    def num_other(self) -> int:
        """Rows of the other split."""
        return len(self.marks) - self.num_rows

    def pieces(self, span: Span) -> tuple[str, ...]:
        """The part's inputs as its plan names them: `prompts.jsonl:1-500`."""
        return tuple(f"{self.files[s.file].file.key}:{s.first}-{s.last}" for s in span.stretches)


def survey(files: Sequence[RowFile], settings: GenerateSettings, reading: Reading) -> Survey:
    """Reads every input once; InputError where no row of the split is a prompt, with the reasons."""
    notes = _Notes(settings, reading)
    rows_of_file = tuple(notes.read(number, file) for number, file in enumerate(files))
    marks = notes.mark_repeats()
    if not np.any(marks & (IN_SPLIT | IS_PROMPT) == IN_SPLIT | IS_PROMPT):
        raise InputError(_nothing_left(settings, len(marks), notes.first_loss))
    return Survey(tuple(files), rows_of_file, marks, notes.crcs(), notes.spans(marks))


@dataclass
class _Notes:
    """What is written down while reading."""

    settings: GenerateSettings
    reading: Reading
    first_loss: Dropped | None = None
    _ids: bytearray = field(default_factory=bytearray)
    _contents: bytearray = field(default_factory=bytearray)
    _marks: bytearray = field(default_factory=bytearray)
    _crcs: "array[int]" = field(default_factory=lambda: array("I"))
    _prompts: "array[int]" = field(default_factory=lambda: array("H"))
    _asked: "array[int]" = field(default_factory=lambda: array("H"))
    _parts: list["_PartNotes"] = field(default_factory=list)

    def read(self, number: int, file: RowFile) -> int:
        """Notes the rows of one file; returns how many there are."""
        before = len(self._marks)
        for line, data in file.lines():
            if len(self._marks) % _TOLD_EVERY_ROWS == _TOLD_EVERY_ROWS - 1:
                logger.info("read %s rows", f"{len(self._marks) + 1:,}")
            self._note(number, line, data, self.reading.prompts(file.file.key, line, data))
        return len(self._marks) - before

    def _note(self, file: int, line: int, data: bytes, found: Sequence[Prompt | Dropped]) -> None:
        prompts = [unit for unit in found if isinstance(unit, Prompt)]
        # A line without an id falls on a side by its place, so that it is reported once, not in both splits.
        row_id = prompts[0].row.id if prompts else found[0].id
        is_ours = is_in_split(row_id or f"{file}:{line}", self.settings.split, self.settings.held_out_frac)
        if is_ours:
            self._add_to_part(file, line, data)
            if isinstance(found[0], Dropped) and self.first_loss is None:
                self.first_loss = found[0]
        self._crcs.append(zlib.crc32(data))
        self._marks.append((IN_SPLIT if is_ours else 0) | (IS_PROMPT if prompts else 0))
        self._ids += _digest(prompts[0].row.id.encode()) if prompts else bytes(DIGEST_BYTES)
        self._contents += _digest(self.reading.content(prompts[0])) if prompts else bytes(DIGEST_BYTES)
        self._prompts.append(min(len(prompts), _MOST_TURNS))
        self._asked.append(min(sum(not prompt.is_answered for prompt in prompts), _MOST_TURNS))

    def _add_to_part(self, file: int, line: int, data: bytes) -> None:
        if not self._parts or self._parts[-1].num_rows == self.settings.part_rows:
            self._parts.append(_PartNotes())
        self._parts[-1].add(file, line, len(self._marks), data)

    def crcs(self) -> NDArray[np.uint32]:
        """Of each row's line."""
        return np.frombuffer(self._crcs, np.uint32)

    def mark_repeats(self) -> NDArray[np.uint8]:
        """The rows' bits, repeats among them: a row that is dropped for its id does not claim its content."""
        marks = np.frombuffer(self._marks, np.uint8).copy()
        marks[_repeats(self._ids, marks & IS_PROMPT != 0)] |= SAME_ID
        self._ids.clear()
        marks[_repeats(self._contents, (marks & IS_PROMPT != 0) & (marks & SAME_ID == 0))] |= SAME_CONTENT
        return marks

    def spans(self, marks: NDArray[np.uint8]) -> tuple[Span, ...]:
        """The parts, in order."""
        is_ours = marks & IN_SPLIT != 0
        part_of_row = (np.cumsum(is_ours) - 1) // self.settings.part_rows
        counts = is_ours & (marks & (SAME_ID | SAME_CONTENT) == 0)

        def per_part(numbers: "array[int]") -> list[int]:
            kept = np.frombuffer(numbers, np.uint16)[counts]
            return np.bincount(part_of_row[counts], weights=kept, minlength=len(self._parts)).astype(int).tolist()

        prompts, asked = per_part(self._prompts), per_part(self._asked)
        return tuple(
            Span(part_name(i), notes.stretches(), notes.digest.digest(), prompts[i], asked[i])
            for i, notes in enumerate(self._parts)
        )


class _PartNotes:
    """The lines of one part, as they are read."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._lines: list[list[int]] = []

    def add(self, file: int, line: int, row: int, data: bytes) -> None:
        """The next row of the split."""
        self.num_rows += 1
        self.digest.update(data)
        if not self._lines or self._lines[-1][0] != file:
            self._lines.append([file, line, line, row])
        self._lines[-1][2] = line

    def stretches(self) -> tuple[Stretch, ...]:
        """One for each file that the part reads from."""
        return tuple(Stretch(*numbers) for numbers in self._lines)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _repeats(digests: bytearray, counts: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Numbers of the rows, among those that count, whose digest an earlier one has."""
    halves = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    rows = np.flatnonzero(counts)
    order = np.lexsort((halves[rows, 1], halves[rows, 0]))  # stable: of equal digests, the first row comes first
    ordered = halves[rows[order]]
    is_repeat = (ordered[1:] == ordered[:-1]).all(axis=1)
    return rows[order[1:][is_repeat]]


def _nothing_left(settings: GenerateSettings, num_rows: int, first: Dropped | None) -> str:
    where = ", ".join(settings.input)
    if first is not None:
        return (
            f"{where}: none of {num_rows:,} rows is a prompt of --split {settings.split}; the first that is none, "
            f"{first.file} line {first.line}: {first.reason}"
        )
    if num_rows:
        return (
            f"{where}: none of {num_rows:,} rows falls into --split {settings.split} at --held-out-frac "
            f"{settings.held_out_frac}: give more rows, or another --held-out-frac"
        )
    return f"{where}: no rows; a prompt file has one JSON object a line"
