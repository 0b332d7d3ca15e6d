"""Checkpoints of one run in all its stores: which ones stay, where a rerun goes on.

A checkpoint that is due is copied in memory and written behind the loop's back. A run that is stopped between two of
them leaves one more on local disk; the next start goes on from the newest that is whole anywhere, and gives it to every
store that lacks it.
"""

import logging
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.cache import cache_folder
from draftmill.storage.checkpoints import (
    POSITION_FILE,
    Marker,
    find_marker,
    holds_checkpoint,
    put_checkpoint,
    read_checkpoint,
    refuse_blocked,
    remove_checkpoints,
    steps_on,
    sweep_checkpoints,
)
from draftmill.storage.patience import Patiently
from draftmill.storage.store import Store, open_store
from draftmill.train.behind import Behind
from draftmill.train.metrics import METRICS_FILE
from draftmill.train.state import RunState, position_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of the run whose plan's hash is `plan`: step 0, every `save_every`th, and the last one."""

    stores: tuple[Store, ...]
    plan: str
    num_steps: int
    save_every: int
    keep: int
    patiently: Patiently
    """Asks a store that does not answer again."""
    behind: Behind = field(default_factory=Behind)
    _disk: AbstractContextManager[bool] = field(default_factory=Lock)
    """Held by whoever writes to a local folder: two threads would write the same drafts."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written when `step` steps are done."""
        return step % self.save_every == 0 or step == self.num_steps

    def kept(self, step: int) -> set[int]:
        """The steps whose checkpoints stand when the one of `step` is there: step 0, the newest `keep` due, and it."""
        last = {self.num_steps} if self.num_steps <= step else set[int]()
        due = sorted({*range(0, step + 1, self.save_every)[-self.keep :], *last})
        return {0, *due[-self.keep :], step}

    def start(self, run: RunState) -> None:
        """Puts `run` where its newest checkpoint stands; a new run gets its first one."""
        for store in self.stores:
            refuse_blocked(store)
        if not self.resume(run):
            places = ", ".join(store.url for store in self.stores)
            log.info("a new run of %s steps: its first weights are written to %s", f"{self.num_steps:,}", places)
            self.save(run, b"")
            self.behind.settle()

    def save(self, run: RunState, metrics: bytes) -> None:
        """Takes the checkpoint of where the run stands, and has it written; waits for the one before.

        Where a store has gone, training goes on until the next checkpoint is due, or patience is.
        """
        is_sound = run.position.bad_in_a_row == 0
        self.behind.do(partial(self._write, run.position.step, run.files(), metrics, is_sound=is_sound))

    def _write(self, step: int, files: dict[str, bytes], metrics: bytes, *, is_sound: bool) -> None:
        """Log first and marker last; then older checkpoints go. Newer ones are another thread's."""
        for store in _local_first(self.stores):
            if store.folder is None:  # local folders have every line at once
                self.patiently(partial(store.put, METRICS_FILE, metrics), store.url)
            with nullcontext() if store.folder is None else self._disk:
                self.patiently(partial(put_checkpoint, (store,), step, self.plan, files), store.url)
        for store in self.stores:
            self.patiently(partial(self._prune, store, step, step, is_sound=is_sound), store.url)

    def _prune(self, store: Store, step: int, until: int, *, is_sound: bool) -> None:
        """Removes what need not stand beside `step`, older ones only where that one is sound.

        Amid bad steps the weights may be broken already, by the last update before them.
        """
        kept = self.kept(step) if is_sound else range(step + 1)
        remove_checkpoints(store, [s for s in steps_on(store) if s < until and s not in kept])

    def leave(self, run: RunState, metrics: bytes) -> None:
        """Writes where a run that is being stopped stands to local disk: the run's own folder, or else the cache."""
        place = next((store for store in self.stores if store.folder is not None), None)
        try:
            place = place or open_store(str(self._left), create=True)
            place.put(METRICS_FILE, metrics)  # also where it stands already: what ends the run may be a line cut short
            with self._disk:
                there = find_marker(place, run.position.step)
                if there is None or there.plan != self.plan:
                    put_checkpoint((place,), run.position.step, self.plan, run.files())
        except StorageError as error:
            log.warning("step %d could not be kept, an older checkpoint stands: %s", run.position.step, error)
        else:
            log.info("stopped at step %d, which is kept in %s", run.position.step, place.url)

    @property
    def _left(self) -> Path:
        """Where this host keeps what a run without a local output has left."""
        return cache_folder() / "stopped" / self.plan

    def resume(self, run: RunState) -> bool:
        """Puts `run` where its newest checkpoint stands that is whole somewhere; False where there is none.

        Afterwards every store holds it, and none holds a newer one.
        """
        left = (open_store(str(self._left)),) if self._left.is_dir() else ()
        places = _local_first((*self.stores, *left))
        for place in places:
            sweep_checkpoints(place)
        for step in sorted({step for place in places for step in steps_on(place)}, reverse=True):
            for place in places:
                files = self._read(place, step)
                if files is not None and _takes(run, step, files):
                    log.info("going on from step %s of %s, found in %s", f"{step:,}", f"{self.num_steps:,}", place.url)
                    self._share(place, step, files, is_sound=run.position.bad_in_a_row == 0)
                    return True
            log.warning("checkpoint of step %d is incomplete or another run's; looking for an older one", step)
        return False

    def _share(self, place: Store, step: int, files: dict[str, bytes], *, is_sound: bool) -> None:
        """Gives a checkpoint, and the log that led to it, to every store that lacks it."""
        metrics, marker = place.find(METRICS_FILE), find_marker(place, step)
        assert marker is not None, "it was read a moment ago"
        for store in self.stores:
            if not holds_checkpoint(store, marker):
                put_checkpoint((store,), step, self.plan, files)
            if metrics is not None and store != place:
                store.put(METRICS_FILE, metrics)
            self._prune(store, step, self.num_steps + 1, is_sound=is_sound)
        shutil.rmtree(self._left, ignore_errors=True)

    def markers(self) -> list[Marker]:
        """The markers of the checkpoints of the finished run that stand, ascending; the last is one of them."""
        steps = sorted(self.kept(self.num_steps))
        markers = [find_marker(self.stores[0], step) for step in steps]
        found = {m.step: m for m in markers if m is not None and m.plan == self.plan}
        if self.num_steps not in found:
            raise StorageError(f"{self.stores[0].url}: the last checkpoint was removed meanwhile; run it again")
        if gone := [step for step in steps if step not in found]:
            log.warning("checkpoints of step %s were removed; the card does not name them", ", ".join(map(str, gone)))
        return list(found.values())

    def _read(self, store: Store, step: int) -> dict[str, bytes] | None:
        """The files of a step's checkpoint, if the store holds it whole and it belongs to this run's plan."""
        marker = find_marker(store, step)
        return read_checkpoint(store, marker) if marker is not None and marker.plan == self.plan else None


def _takes(run: RunState, step: int, files: dict[str, bytes]) -> bool:
    """Puts `run` at a checkpoint of `step`, unless its files do not belong together: it is as good as damaged."""
    try:
        if (said := position_of(files).step) != step:
            raise InputError(f"{POSITION_FILE} says step {said}")
        run.restore(files)
    except InputError as error:
        log.warning("checkpoint of step %d: %s", step, error)
        return False
    return True


def _local_first(places: Sequence[Store]) -> list[Store]:
    """What lies on a local disk is written at once, and need not be fetched."""
    return sorted(places, key=lambda place: place.folder is None)
