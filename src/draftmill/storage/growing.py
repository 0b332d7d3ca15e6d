"""A set read while it is still being made: its parts in the plan's order, each as soon as its record is there.

    plan.json           -> which parts there will be, and the set's identity
    part-00000.json …   -> each part's file, rows, bytes and sha256, in whatever order they appear
    card.json           -> nothing new about the parts, but that all are there and the set has passed its gate

What a reader has taken from records is compared with the card as soon as there is one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from draftmill.contracts.cards import CARD_FILE, PLAN_FILE, Card, InputFile, Plan, record_file
from draftmill.contracts.errors import StorageError
from draftmill.storage.patience import Patiently
from draftmill.storage.set_files import card_at, part_file, plan_at, record_at, refuse_refused
from draftmill.storage.store import Store, open_store
from draftmill.storage.waiting import Errand, Waiting

T = TypeVar("T")


@dataclass(frozen=True)
class KnownPart:
    """A part that is there: its file, identified by its sha256, and its rows."""

    name: str
    file: InputFile
    rows: int


class GrowingSet:
    """The set at `store`; `card` is the one that was there when it was opened."""

    def __init__(self, store: Store, plan: Plan, card: Card | None, waiting: Waiting, patiently: Patiently) -> None:
        self.store = store
        self.plan = plan
        self.waiting = waiting
        self.was_finished = card is not None
        """Whether all parts were there from the start."""
        self.patiently = patiently
        """Asks a store that does not answer again."""
        self._known: dict[int, KnownPart] = {}
        self._card: Card | None = None
        self._adopt(card)

    @property
    def num_parts(self) -> int:
        """Parts of the plan, made already or not."""
        return len(self.plan.parts)

    @property
    def is_local(self) -> bool:
        """Whether its files lie in a local folder."""
        return self.store.folder is not None

    def part(self, index: int) -> KnownPart:
        """Part `index` of the plan, waited for; StalledError where its maker has stopped."""
        if index not in self._known:
            name = self.plan.parts[index].name
            look = partial(self._beside, partial(self.find, index))
            self.waiting.until(look, self._what(name), self._life)
            if self._card is None:
                self._adopt(self._ask(partial(card_at, self.store)))
        return self._known[index]

    def find(self, index: int) -> KnownPart | None:
        """Part `index` of the plan, if it is there."""
        if index not in self._known and index < self.num_parts:
            question = partial(record_at, self.store, self.plan.parts[index].name, self.plan)
            record = self.patiently(question, self.store.url)
            if record is not None:
                self._known[index] = KnownPart(
                    record.name, part_file(record.file, record.bytes, record.sha256), record.rows
                )
        return self._known.get(index)

    def complete(self) -> None:
        """Waits for the card, which says that the whole set has passed its gate."""
        if self._card is None:
            look = partial(self._ask, partial(card_at, self.store))
            self._adopt(self.waiting.until(look, self._what(CARD_FILE), self._life))

    def _what(self, name: str) -> str:
        return f"{name} of {self.store.url}"

    def _ask(self, question: Callable[[], T]) -> T:
        return self._beside(partial(self.patiently, question, self.store.url))

    def _beside(self, question: Callable[[], T]) -> T:
        """A store may be gone for minutes: who asks must stay able to stop."""
        return Errand(question).result(self.waiting.heed)

    def _life(self) -> str:
        """How much of the set is there; StorageError where it is no longer the set that was opened, DataGateError where
        its gate has refused it meanwhile."""
        if self._ask(partial(plan_at, self.store, self.plan.room)).hash != self.plan.hash:
            raise StorageError(
                f"{self.store.url}/{PLAN_FILE} is another plan than when reading began: that set was replaced; give "
                "each set its own folder"
            )
        self._ask(partial(refuse_refused, self.store, self.plan))
        there = self._ask(self.store.sizes)
        count = sum(record_file(part.name) in there for part in self.plan.parts)
        return f"{count:,} of {self.num_parts:,} parts are there"

    def _adopt(self, card: Card | None) -> None:
        """Takes the parts as the card names them; StorageError where some were read otherwise."""
        if card is None:
            return
        parts = [
            KnownPart(part["name"], part_file(part["file"], part["bytes"], part["sha256"]), part["rows"])
            for part in card.content["parts"]
        ]
        changed = [part.name for i, part in enumerate(parts) if self._known.get(i, part) != part]
        if changed or len(parts) != self.num_parts:
            raise StorageError(
                f"{self.store.url}/{CARD_FILE} names other parts than were read before it was there "
                f"({', '.join(changed[:5]) or 'another number'}): the set was made anew meanwhile; train on it in "
                "another --output"
            )
        self._known, self._card = dict(enumerate(parts)), card


def open_growing(url: str, room: str, waiting: Waiting, patiently: Patiently) -> GrowingSet:
    """The set at `url`, which `room` has made or is making; StorageError where there is no plan of that room,
    DataGateError where its gate has refused it."""
    store = open_store(url)
    plan, card = plan_at(store, room), card_at(store)
    if card is None:
        refuse_refused(store, plan)
    return GrowingSet(store, plan, card, waiting, patiently)
