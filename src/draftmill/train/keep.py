"""Checkpoints of one run in all its stores: which ones stay, where a rerun goes on."""

import logging
from dataclasses import dataclass

from draftmill.contracts.errors import StorageError
from draftmill.storage.checkpoints import (
    Marker,
    find_marker,
    put_checkpoint,
    read_checkpoint,
    remove_checkpoints,
    steps_on,
)
from draftmill.storage.store import Store
from draftmill.train.state import RunState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of the run whose plan's hash is `plan`: step 0, every `save_every`th, and the last one."""

    stores: tuple[Store, ...]
    plan: str
    num_steps: int
    save_every: int
    keep: int

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written when `step` steps are done."""
        return step % self.save_every == 0 or step == self.num_steps

    def kept(self, step: int) -> set[int]:
        """The steps whose checkpoints stand when `step` steps are done: step 0 and the newest `keep`."""
        due = [s for s in range(0, step + 1) if self.is_due(s)]
        return {0, *due[-self.keep :]}

    def save(self, run: RunState) -> None:
        """Writes the checkpoint of where the run stands, then removes those that need not be kept."""
        put_checkpoint(self.stores, run.position.step, self.plan, run.files())
        self.prune(run.position.step)

    def prune(self, step: int) -> None:
        """Leaves what is kept when `step` steps are done, and nothing else."""
        for store in self.stores:
            remove_checkpoints(store, [s for s in steps_on(store) if s not in self.kept(step)])

    def resume(self, run: RunState) -> bool:
        """Puts `run` where its newest checkpoint stands that is whole in every store; False where there is none."""
        for step in sorted(set.intersection(*(set(steps_on(store)) for store in self.stores)), reverse=True):
            files = self._whole(step)
            if files is not None:
                run.restore(files)
                self.prune(step)
                return True
            log.warning("checkpoint of step %d is incomplete or another run's; looking for an older one", step)
        return False

    def markers(self) -> list[Marker]:
        """The markers of all kept checkpoints of the finished run, ascending."""
        found = [find_marker(self.stores[0], step) for step in sorted(self.kept(self.num_steps))]
        if None in found:
            raise StorageError(f"{self.stores[0].url}: a checkpoint was removed while the run went on; run it again")
        return [marker for marker in found if marker is not None]

    def _whole(self, step: int) -> dict[str, bytes] | None:
        """The files of a step's checkpoint, if every store holds it whole and it belongs to this run's plan."""
        found = [self._read(store, step) for store in self.stores]
        return None if None in found else found[0]

    def _read(self, store: Store, step: int) -> dict[str, bytes] | None:
        marker = find_marker(store, step)
        return read_checkpoint(store, marker) if marker is not None and marker.plan == self.plan else None
