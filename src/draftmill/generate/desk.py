"""Where a set is put together: what is left to do, parts opened and published, the card at the end.

One run at a time: local outputs and the spool are locked while it lasts.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftmill.contracts.cards import PLAN_FILE, Card, InputFile, PartRecord, canonical_json, make_card
from draftmill.contracts.errors import DataGateError, StorageError
from draftmill.generate.card import content_of, licences_on, tell
from draftmill.generate.closing import SUFFIXES, close_part, earlier_files
from draftmill.generate.gate import judge, judge_whole
from draftmill.generate.intake import Intake
from draftmill.generate.meter import Meter
from draftmill.generate.part import OpenPart, Published
from draftmill.generate.plan import Blueprint
from draftmill.generate.spool import Spool, alone_in, open_spool
from draftmill.generate.survey import Span
from draftmill.storage.fetch import SHA256, local_copy
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter, open_set_writer
from draftmill.storage.store import open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Left:
    """A part to make; `record` where it was published and some of its rows failed."""

    span: Span
    record: PartRecord | None
    num_done: int
    """Prompts that the spool holds already."""

    @property
    def num_prompts(self) -> int:
        """Prompts that are to come to an end, those an earlier run saved included."""
        return self.span.num_prompts if self.record is None else len(self.record.failed)

    @property
    def num_asked(self) -> int:
        """Prompts that the target is asked for, about: none only where an engine is not needed."""
        if self.record is not None:
            return len(self.record.failed)
        return self.span.num_asked if self.num_done < self.span.num_prompts else 0


@dataclass(frozen=True)
class Desk:
    """One set in the making."""

    blueprint: Blueprint
    writer: SetWriter
    spool: Spool

    def finished(self) -> Card | None:
        """The card, where there is nothing left to do."""
        card = self.writer.card()
        if card is None or licences_on(card) != self.blueprint.licences:
            return None
        if card.content["failed"]:
            return card if self.blueprint.settings.keep_finished else None
        self._sweep(self.writer.records().values())  # the run before may have ended between the card and this
        return card

    def left(self) -> list[Left]:
        """The parts to make, in order: those that some output lacks, and those of which rows failed."""
        made = self.writer.records()
        asks_again = not self.blueprint.settings.keep_finished or self.writer.card() is None
        found = []
        for span in self.blueprint.survey.spans:
            record, file = made.get(span.name), self.spool.file(span.name)
            if record is None or (record.failed and asks_again):
                found.append(Left(span, record, len(file.places())))
            else:
                file.remove()  # the run before ended between publishing the part and this
        return found

    def open_parts(self, left: Sequence[Left], meter: Meter) -> Iterator[OpenPart]:
        """The parts, one after another."""
        for part in left:
            published = None if part.record is None else self._published(part.record)
            yield OpenPart(part.span, self.spool.file(part.span.name), published, meter)

    def intake(self) -> Intake:
        """The prompts of the parts, to be read once, in order."""
        return Intake(self.blueprint.survey, self.blueprint.reading)

    def close_unasked(self, left: Sequence[Left]) -> None:
        """Makes parts of which no prompt is to be asked: no engine is needed for them."""
        intake = self.intake()
        for part in self.open_parts(left, Meter(sum(part.num_prompts for part in left), tuple)):
            for talk in part.conversations(intake, self.blueprint.manner):
                assert part.is_done(talk), "none of these prompts is to be asked"
                part.keep(talk.prompt.id, None)
            self.close(part)

    def _published(self, record: PartRecord) -> Published:
        aside = record.set_aside
        named = {record.file: (record.bytes, record.sha256)}
        named |= {aside.file: (aside.bytes, aside.sha256)} if aside else {}
        files = [InputFile(key=name, size=size, identity=SHA256 + sha256) for name, (size, sha256) in named.items()]
        return Published(record, {file.key: local_copy(self.writer.stores[0], file) for file in files})

    def close(self, part: OpenPart) -> None:
        """Judges and publishes a part that is whole; DataGateError where it is refused, its answers kept."""
        closed = close_part(part, self.spool, self.writer.plan.hash, SUFFIXES[self.blueprint.settings.compression])
        try:
            if closed.is_changed:
                self._judge(closed.record, part)
                self._refuse_another_plan()
                beside = {name: path for name, path in closed.drafts.items() if name != closed.record.file}
                self.writer.publish(closed.record, closed.drafts[closed.record.file], beside)
        finally:
            for draft in closed.drafts.values():
                draft.unlink(missing_ok=True)
        part.file.remove()

    def _judge(self, record: PartRecord, part: OpenPart) -> None:
        try:
            judge([record], self.blueprint.settings, record.name)
        except DataGateError as error:
            raise DataGateError(
                f"{error}.\nThe part's answers are kept: a rerun judges them again. If the engine was at fault, remove "
                f"{part.file.path}, and they are asked for again"
            ) from error

    def _refuse_another_plan(self) -> None:
        """Another host may have begun another set in the same place, where no lock holds."""
        for store in self.writer.stores:
            if store.find(PLAN_FILE) != canonical_json(self.writer.plan):
                raise StorageError(
                    f"{store.url}/{PLAN_FILE} was changed by somebody else while this run was at work: its answers are "
                    "kept in the spool; see who writes there, or name another --output"
                )

    def finish(self, watch: Stopwatch, engines: dict[str, Any]) -> Card:
        """Judges the whole, then publishes the card; what it no longer names is removed."""
        records = self.writer.all_records()
        tell(records)
        judge_whole(records, self.blueprint.settings)
        content = content_of(self.blueprint, records)
        run = {**provenance(watch), "target": self.blueprint.settings.target, **engines}
        card = make_card("generate", self.writer.plan, records, content, run)
        before = self.writer.card()
        if before is None or before.content_hash != card.content_hash:
            self.writer.finish(card)
            before = card
        self._sweep(records)
        shutil.rmtree(self.spool.folder, ignore_errors=True)
        return before

    def _sweep(self, records: Iterable[PartRecord]) -> None:
        """Removes data files of parts taken up again that no record names any more."""
        if names := [name for record in records for name in earlier_files(record)]:
            for store in self.writer.stores:
                store.delete(names)


@contextmanager
def open_desk(blueprint: Blueprint) -> Iterator[Desk]:
    """The desk of a set, its plan published; StorageError where another run is at work on it."""
    settings, plan = blueprint.settings, blueprint.plan
    stores = [open_store(url, create=True) for url in settings.output]
    with (
        alone_in([store.folder for store in stores if store.folder is not None]),
        open_spool(settings.spool, plan.hash, stores) as spool,
    ):
        writer = open_set_writer(settings.output, plan)
        writer.share()
        yield Desk(blueprint, writer, spool)
