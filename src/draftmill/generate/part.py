"""One part in the making: its prompts are read as they are asked for, and how each ended goes to the spool.

It holds the ids of its prompts and which of them failed, not their rows: a part that waits for one slow answer costs
little. A published part of which rows had failed is taken up again: those are asked, the others stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftmill.contracts.cards import Dropped, PartRecord
from draftmill.generate.conversation import Conversation, Kept
from draftmill.generate.imports import taken_as_is
from draftmill.generate.intake import Intake
from draftmill.generate.manner import Manner
from draftmill.generate.meter import Meter
from draftmill.generate.spool import SpoolFile
from draftmill.generate.survey import Span
from draftmill.storage.row_files import numbered_lines

Kind = Literal["row", "aside"]


@dataclass(frozen=True)
class Published:
    """A part as it was published, with local copies of its files by their names."""

    record: PartRecord
    local: dict[str, Path]

    def lines(self, kind: Kind) -> Iterator[bytes]:
        """Its rows, or those set aside, in order, line ends included."""
        aside = self.record.set_aside
        name = self.record.file if kind == "row" else aside.file if aside else None
        if name is not None:
            for _, line in numbered_lines(self.local[name], name):
                yield line + b"\n"


class OpenPart:
    """A part whose prompts are being answered. `ids` are its prompts so far, in order; `left_out` its other rows."""

    def __init__(self, span: Span, file: SpoolFile, published: Published | None, meter: Meter) -> None:
        self.span = span
        self.file = file
        self.published = published
        self.is_closing = False
        self.ids: list[str] = []
        self.left_out: list[Dropped] = []
        self.failed: dict[str, Dropped] = {}
        self._again = {drop.id for drop in published.record.failed} if published else None
        self._meter = meter
        self._done: set[str] = set()
        self._num_open = 0
        self._is_read = False

    @property
    def is_whole(self) -> bool:
        """Whether every prompt has come to its end."""
        return self._is_read and self._num_open == 0

    def concerns(self, row_id: str) -> bool:
        """Whether the prompt is to come to an end here: of a part taken up again, only those that failed are."""
        return self._again is None or row_id in self._again

    def is_done(self, talk: Conversation) -> bool:
        """Whether the row was answered by an earlier run already."""
        return talk.prompt.id in self._done

    def conversations(self, intake: Intake, manner: Manner) -> Iterator[Conversation]:
        """The prompts to ask, those that are done already among them; each is to be ended by `keep` or `fail`.

        They are read as they are taken, so the part is not whole before this has come to its end.
        """
        self.file.mend()
        self._done = set(self.file.places())
        for unit in intake.units(self.span):
            if isinstance(unit, Dropped):
                self.left_out.append(unit)
                continue
            self.ids.append(unit.id)
            if not self.concerns(unit.id):
                continue
            self._num_open += 1
            talk = None if unit.is_answered else Conversation(unit, manner)
            if talk is None:
                self.keep(unit.id, taken_as_is(unit, manner))
            elif talk.end is None:
                yield talk
            else:
                self.keep(unit.id, talk.end)
        self._is_read = True

    def keep(self, row_id: str, end: Kept | Dropped | None) -> None:
        """Saves how a prompt ended, unless an earlier run saved it already."""
        if row_id in self._done:
            self._meter.skip()
        else:
            assert end is not None, "a row is saved when it is done"
            self.file.append(end)
            self._done.add(row_id)
            self._meter.ended(end)
        self._num_open -= 1

    def fail(self, talk: Conversation, reason: str, detail: str) -> None:
        """Notes that no answer was to be had; a later run asks again."""
        self._num_open -= 1
        self.failed[talk.prompt.id] = talk.prompt.dropped(reason, detail)
        self._meter.ended(None)
