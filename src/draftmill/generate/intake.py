"""The second pass over the prompts: the lines of one part after another, in the survey's order, each read once."""

import hashlib
import zlib
from collections.abc import Iterator

from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import InputError
from draftmill.generate.prompts import Prompt, Reading
from draftmill.generate.survey import (
    DIGEST_BYTES,
    IN_SPLIT,
    REPEATED_CONTENT,
    REPEATED_ID,
    SAME_CONTENT,
    SAME_ID,
    Span,
    Stretch,
    Survey,
)


class Intake:
    """Goes over the files once, forward: parts are asked for in the survey's order, some may be passed over."""

    def __init__(self, found: Survey, reading: Reading) -> None:
        self._found = found
        self._reading = reading
        self._file: int | None = None
        self._lines: Iterator[tuple[int, bytes]] = iter(())

    def units(self, span: Span) -> Iterator[Prompt | Dropped]:
        """The part's prompts and the rows left out, in order; InputError where a file changed since the survey, before
        a row is given that is another now: its answer would be kept as the other's."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for stretch in span.stretches:
            key = self._found.files[stretch.file].file.key
            for row, (line, data) in enumerate(self._stretch(stretch), start=stretch.row):
                if row >= len(self._found.marks) or zlib.crc32(data) != self._found.crcs[row]:
                    raise self._changed(span)
                marks = int(self._found.marks[row])
                if marks & IN_SPLIT:
                    digest.update(data)
                    yield from self._one(key, line, data, marks)
        if digest.digest() != span.digest:
            raise self._changed(span)

    def _changed(self, span: Span) -> InputError:
        names = ", ".join(self._found.pieces(span))
        return InputError(f"{names} changed while it was read: run the same command again, which plans anew")

    def _stretch(self, stretch: Stretch) -> Iterator[tuple[int, bytes]]:
        if self._file != stretch.file:
            self._file, self._lines = stretch.file, self._found.files[stretch.file].lines()
        for line, data in self._lines:
            if line >= stretch.first:
                yield line, data
            if line >= stretch.last:
                return

    def _one(self, file: str, line: int, data: bytes, marks: int) -> Iterator[Prompt | Dropped]:
        units = self._reading.prompts(file, line, data)
        if not marks & (SAME_ID | SAME_CONTENT):
            yield from units
            return
        ids = [unit.row.id if isinstance(unit, Prompt) else unit.id for unit in units]
        reason = REPEATED_ID if marks & SAME_ID else REPEATED_CONTENT
        yield Dropped(file=file, line=line, id=ids[0], reason=reason)
