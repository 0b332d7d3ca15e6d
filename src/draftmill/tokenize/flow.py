"""Parts on their way: fetched ahead of the workers, made side by side, closed in the plan's order, published meanwhile.

    inputs ──32 ranges at a time──► workers ──► the ledger, in order ──► judged ──► uploads: data, rows, then the record

Parts are taken up in the plan's order while a budget of local bytes lasts, so that no stage runs away from the next.
A part is closed when all parts before it are known. With `--shard` some are other runs' work: what cannot be closed is
kept beside the set (`ledger.Made`), and closed by whichever run finds that nothing is missing any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from draftmill.contracts.cards import PLAN_FILE, InputFile, PartRecord, canonical_json, record_file
from draftmill.contracts.errors import DataGateError
from draftmill.storage.sets import SetWriter
from draftmill.storage.store import Store
from draftmill.storage.transfer import Transfers, together
from draftmill.tokenize.budget import Budget
from draftmill.tokenize.inputs import Inputs
from draftmill.tokenize.ledger import Ledger, Made, decode_made, encode_made, made_file
from draftmill.tokenize.part import OnRead, PartJob, shard_file
from draftmill.tokenize.pieces import PartInputs
from draftmill.tokenize.pool import Pool

MAX_UPLOADS = 4
"""Parts published at a time."""


@dataclass(frozen=True)
class Stages:
    """What a part passes through."""

    inputs: Inputs
    pool: Pool
    transfers: Transfers
    spool: Path
    """Local folder for shards that are not published yet."""
    budget: Budget
    on_read: OnRead


class _Turn(NamedTuple):
    """When a part may be closed, and when the next one may: True where all that came before is known."""

    before: "asyncio.Future[bool]"
    after: "asyncio.Future[bool]"


class Flow:
    """One run over the parts of a plan; makes those that `is_ours` names and that are missing."""

    def __init__(
        self,
        writer: SetWriter,
        stages: Stages,
        is_ours: Callable[[PartInputs], bool],
        judge: Callable[[PartRecord], None],
    ) -> None:
        self._writer, self._stages, self._is_ours, self._judge = writer, stages, is_ours, judge
        self._ledger = Ledger()
        self._publishing: set[asyncio.Task[None]] = set()
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._complete = writer.records()
        self._sizes = writer.sizes()
        self._plans: list[InputFile | None] = [None] * len(writer.stores)  # those that are known to be ours

    def is_to_be_made(self, part: PartInputs) -> bool:
        """Whether the part is this run's and no earlier run has left what is known of its rows."""
        return self._is_ours(part) and not self._is_kept(part)

    def _is_kept(self, part: PartInputs) -> bool:
        """Whether every store holds what is known of the part's rows."""
        return all(made_file(part.name) in there for there in self._sizes)

    async def run(self, parts: Sequence[PartInputs]) -> None:
        """Makes what is missing of the parts of a plan, given in its order; publishes what can be closed."""
        loop = asyncio.get_running_loop()
        before: asyncio.Future[bool] = loop.create_future()
        before.set_result(True)
        async with together() as tasks:
            for part in parts:
                if self.is_to_be_made(part):
                    await self._stages.budget.take(part.local_bytes)
                turn = _Turn(before, loop.create_future())
                tasks.create_task(self._story(part, turn))
                before = turn.after

    async def _story(self, part: PartInputs, turn: _Turn) -> None:
        """From its inputs to its record."""
        is_fresh = is_held = self.is_to_be_made(part)
        made = await self._make(part) if is_fresh else None
        is_known = await turn.before
        if made is None and is_known:
            made = await self._kept(part)
            if made is None and self._is_ours(part):  # what was left of it is damaged
                made, is_fresh = await self._make(part), True
        if made is not None and is_known:
            await self._close(part, turn, made, is_fresh=is_fresh)
        else:
            turn.after.set_result(False)
            if made is not None:
                await self._keep(part, made)
        self._stages.inputs.release(part.pieces)
        if is_held:
            self._stages.budget.give_back(part.local_bytes)

    async def _make(self, part: PartInputs, repeats: tuple[int, ...] = ()) -> Made:
        """Has a worker make the part, without the rows numbered in `repeats`."""
        job = PartJob(
            name=part.name,
            plan=self._writer.plan.hash,
            pieces=await self._stages.inputs.obtain(part.pieces),
            shard=str(self._stages.spool / shard_file(part.name, repeats)),
            repeats=repeats,
        )
        return await self._stages.pool.make(job, self._stages.on_read)

    async def _kept(self, part: PartInputs) -> Made | None:
        """What an earlier run has left of the part, if every store has that and its shard."""
        if not self._is_kept(part):
            return None
        data = await self._stages.transfers.find(self._writer.stores[0], made_file(part.name))
        made = decode_made(data, self._writer.plan.hash)
        if made is None or any(there.get(made.record.file) != made.record.bytes for there in self._sizes):
            return None
        return made

    async def _close(self, part: PartInputs, turn: _Turn, made: Made, *, is_fresh: bool) -> None:
        """All parts before it are known: the part's rows are told from theirs, and it is published."""
        repeats = self._ledger.repeated_rows(made)
        if made.record.file != shard_file(part.name, repeats):
            made, is_fresh = await self._make(part, repeats), True
        record = self._ledger.close(made, part.pieces)
        turn.after.set_result(True)
        if is_fresh or self._complete.get(part.name) != record:
            try:
                await self._pass_judgement(record)
            except DataGateError:
                if is_fresh:  # without a record: to be looked at, and judged again by a rerun without being made again
                    await self._keep(part, made)
                raise
            if is_fresh:
                await self._keep(part, made)
            await self._announce(record)
        if made.record.file != (first := shard_file(part.name, ())) and any(first in there for there in self._sizes):
            for store in self._writer.stores:  # made before the parts that it repeats were known
                await asyncio.to_thread(store.delete, [first])

    async def _pass_judgement(self, record: PartRecord) -> None:
        """DataGateError where the part is refused, those that passed before it published first."""
        try:
            self._judge(record)
        except DataGateError:
            if self._publishing:
                await asyncio.wait(self._publishing)
            raise
        story = asyncio.current_task()
        assert story is not None
        self._publishing.add(story)
        story.add_done_callback(self._publishing.discard)

    async def _keep(self, part: PartInputs, made: Made) -> None:
        """Writes the shard, and what is known of its rows, to every store."""
        shard = self._stages.spool / made.record.file

        async def to(store: Store) -> None:
            await self._stages.transfers.upload(store, shard.name, shard, made.record.sha256)
            await self._stages.transfers.put(store, made_file(part.name), encode_made(made))

        await self._refuse_lost()
        async with self._uploads, together() as tasks:
            for store in self._writer.stores:
                tasks.create_task(to(store))
        shard.unlink()

    async def _announce(self, record: PartRecord) -> None:
        """Writes the record to every store: from now on the part is there for readers."""
        await self._refuse_lost()
        async with together() as tasks:
            for store in self._writer.stores:
                tasks.create_task(self._stages.transfers.put(store, record_file(record.name), canonical_json(record)))

    async def _refuse_lost(self) -> None:
        """Another plan may have taken a folder of which nothing had been made yet."""
        for number, store in enumerate(self._writer.stores):
            now = await self._stages.transfers.stat(store, PLAN_FILE)
            if now is None or now != self._plans[number]:
                self._writer.refuse_another_plan(store, await self._stages.transfers.find(store, PLAN_FILE))
                self._plans[number] = now
