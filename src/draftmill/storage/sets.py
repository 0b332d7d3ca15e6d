"""Sets of parts: a plan first, parts with their records as they are made, the card last.

`SetWriter` publishes one set to one or several stores and knows what is missing after an interruption; `SetReader`
reads what a card names (never what a listing finds) and checks every part against its record. What the files of a set
say is read in `set_files.py`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftmill.contracts.cards import (
    CARD_FILE,
    PLAN_FILE,
    RECIPE_FILE,
    REFUSAL_FILE,
    Card,
    InputFile,
    PartRecord,
    Plan,
    PlannedPart,
    Refusal,
    canonical_json,
    record_file,
)
from draftmill.contracts.errors import DataGateError, RecipeError, StorageError
from draftmill.storage.fetch import local_copy
from draftmill.storage.local import sweep_drafts
from draftmill.storage.set_files import card_at, decoded, part_file, plan_at, record_at, refusal_in, refuse_refused
from draftmill.storage.store import Store, find_store, open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetWriter:
    """One set on its way into every store of `stores`."""

    plan: Plan
    stores: tuple[Store, ...]

    def card(self, *beside: str) -> Card | None:
        """The card, if every store holds it, every part that it names, in full length, and what is named `beside`."""
        found = [store.find(CARD_FILE) for store in self.stores]
        if found[0] is None or None in found:
            return None
        card, sizes = decoded(found[0], Card, self.stores[0], CARD_FILE), self.sizes()
        named = [f for part in card.content["parts"] for f in (part, part.get("set_aside")) if f]
        is_whole = all(_held(sizes, f["file"], f["bytes"]) for f in named)
        return card if is_whole and all(name in there for name in beside for there in sizes) else None

    def sizes(self) -> list[dict[str, int]]:
        """What each store holds: bytes by key."""
        return [store.sizes() for store in self.stores]

    def records(self) -> dict[str, PartRecord]:
        """Records of the parts that are complete in every store, by part name."""
        sizes = self.sizes()
        files = [record_file(part.name) for part in self.plan.parts]
        found = self.stores[0].find_all(file for file in files if all(file in there for there in sizes))
        records = [decoded(data, PartRecord, self.stores[0], file) for file, data in found.items()]
        # A record of another plan is a leftover of a run that lost this folder to ours.
        ours = [record for record in records if record.plan == self.plan.hash]
        return {r.name: r for r in ours if all(_held(sizes, file, size) for file, size in r.files)}

    def all_records(self) -> tuple[PartRecord, ...]:
        """The record of every part, in the plan's order, once all were published; StorageError where one is gone."""
        found = self.records()
        if gone := [part.name for part in self.plan.parts if part.name not in found]:
            raise StorageError(
                f"{', '.join(store.url for store in self.stores)}: {', '.join(gone[:5])} was published, but somebody "
                "else removed or changed it meanwhile: run the same command again, which makes it anew"
            )
        return tuple(found[part.name] for part in self.plan.parts)

    def missing(self) -> list[PlannedPart]:
        """Parts still to be made, in the plan's order."""
        done = self.records()
        return [part for part in self.plan.parts if part.name not in done]

    def share(self, *beside: str) -> None:
        """Copies parts that one store holds whole to those that hold another or none: an output that was added, a run
        that ended between two stores. `beside`: endings of what a room keeps beside a part, copied where it is there.
        """
        for part in self.plan.parts if len(self.stores) > 1 else ():
            found = [self._whole(store, part.name) for store in self.stores]
            source = next((n for n, record in enumerate(found) if record is not None), None)
            if source is None:
                continue
            record = found[source]
            assert record is not None
            for store in (s for s, there in zip(self.stores, found, strict=True) if there != record):
                for file in (*(file for file, _ in record.files), *(f"{record.name}{ending}" for ending in beside)):
                    if (data := self.stores[source].find(file)) is not None:
                        store.put(file, data)
                store.put(record_file(record.name), canonical_json(record))

    def _whole(self, store: Store, part: str) -> PartRecord | None:
        """The record of a part, if the store holds it and its files in full length."""
        record = record_at(store, part, self.plan)
        return record if record and all(store.size(file) == size for file, size in record.files) else None

    def publish(self, record: PartRecord, data: bytes | Path, beside: Mapping[str, Path] | None = None) -> None:
        """Writes the part's data and what lies beside it (by file name), then its record, to every store."""
        assert record.plan == self.plan.hash, "a record cites the plan it was made for"
        for store in self.stores:
            for name, path in {**(beside or {}), record.file: data}.items():
                store.put(name, path)
            store.put(record_file(record.name), canonical_json(record))

    def refuse_another_plan(self, store: Store, found: bytes | None) -> None:
        """StorageError unless `found`, the plan that a store holds now, is this set's: another run may have taken a
        folder of which nothing had been made yet.
        """
        if found is None:
            raise StorageError(
                f"{store.url}/{PLAN_FILE} was removed while this run was under way: run the same command again"
            )
        if found != canonical_json(self.plan):
            raise StorageError(
                f"{store.url} has been taken over by a run with another plan while this one was under way: "
                "give each its own --output"
            )

    def publish_file(self, name: str, data: bytes) -> None:
        """Writes a file beside the parts (what another library wants to find there), to every store."""
        for store in self.stores:
            store.put(name, data)

    @contextmanager
    def telling_refusal(self, shard: str | None = None) -> Iterator[None]:
        """What a gate refuses within is said beside the plan too, for whoever comes to read the set; `shard` says which
        of several runs over the set this is.
        """
        try:
            yield
        except DataGateError as error:
            refusal = Refusal(plan=self.plan.hash, reason=str(error), shard=shard)
            try:
                self.publish_file(REFUSAL_FILE, canonical_json(refusal))
            except StorageError as unsaid:
                log.warning("that the set was refused could not be written beside it: %s", unsaid)
            raise

    def forget_refusal(self, shard: str | None = None) -> None:
        """Takes back what a run before has told: the gate is asked again, or has let the set pass. What the gate of
        another shard has refused stays refused.
        """
        for store in self.stores:
            if store.size(REFUSAL_FILE) is None:
                continue
            told = refusal_in(store)
            if shard is None or told is None or told.shard == shard:
                store.delete([REFUSAL_FILE])

    def finish(self, card: Card) -> Card:
        """Publishes the card: the set is complete. The card of another run that made the same set first stands."""
        for store in self.stores:
            self.refuse_another_plan(store, store.find(PLAN_FILE))
        first, *others = self.stores
        there = decoded(first.put_new(CARD_FILE, canonical_json(card)), Card, first, CARD_FILE)
        if there.content_hash != card.content_hash:
            there = card
            first.put(CARD_FILE, canonical_json(card))
        for store in others:
            store.put(CARD_FILE, canonical_json(there))
        self.forget_refusal()
        return there


def _held(sizes: Sequence[dict[str, int]], file: str, size: int) -> bool:
    return all(there.get(file) == size for there in sizes)


def open_set_writer(urls: Sequence[str], plan: Plan) -> SetWriter:
    """A writer for `plan`, its plan published; RecipeError where an output already holds a different set."""
    opened = [open_store(url, create=True) for url in urls]
    places = {store.url if store.folder is None else str(store.folder.resolve()): store for store in opened}
    writer = SetWriter(plan, tuple(places.values()))
    for store in writer.stores:
        if store.folder is not None:
            sweep_drafts(store.folder)
        found = store.put_new(PLAN_FILE, canonical_json(plan))
        if found != canonical_json(plan):
            _refuse_another(store, found, plan)
            store.put(PLAN_FILE, canonical_json(plan))
    return writer


@dataclass(frozen=True)
class Standing:
    """How far a plan has come in its outputs."""

    plan: Plan
    writer: SetWriter | None
    """Of all outputs; None where one of them does not exist yet."""
    left: tuple[PlannedPart, ...]
    """Parts that some output lacks still."""
    card: Card | None
    """As `SetWriter.card` gives it: the set is complete."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do, not even a card to write."""
        return self.card is not None

    @property
    def words(self) -> str:
        """As a dry run tells people."""
        return "done" if self.is_done else f"{len(self.left):,} of {len(self.plan.parts):,} parts are left to make"


def look_at(urls: Sequence[str], plan: Plan, *beside: str) -> Standing:
    """How far `plan` has come, told without writing; RecipeError as `open_set_writer` raises.

    `beside`: as `SetWriter.card` is told.
    """
    writer = find_set_writer(urls, plan)
    if len(writer.stores) < len(urls):
        return Standing(plan, None, plan.parts, None)
    return Standing(plan, writer, tuple(writer.missing()), writer.card(*beside))


def find_set_writer(urls: Sequence[str], plan: Plan) -> SetWriter:
    """As `open_set_writer`, but nothing is made or written: outputs that do not exist yet are left out."""
    writer = SetWriter(plan, tuple(store for store in map(find_store, urls) if store is not None))
    for store in writer.stores:
        if (found := store.find(PLAN_FILE)) is not None:
            _refuse_another(store, found, plan)
    return writer


def _refuse_another(store: Store, found: bytes, plan: Plan) -> None:
    there = decoded(found, Plan, store, PLAN_FILE)
    if there.hash != plan.hash and not _gives_way(store, there, plan.room):
        raise RecipeError(
            f"{store.url} already holds another {there.room} set: {_difference(there, plan)}. "
            "Name another --output, or remove that folder"
        )


def _gives_way(store: Store, there: Plan, room: str) -> bool:
    """Whether nothing was made of the plan: its run failed at the start, or its gate refused the first part, which
    stays to be looked at until the same room makes another set.
    """
    keys = store.sizes().keys()
    made = {CARD_FILE, *(record_file(part.name) for part in there.parts)}
    is_refused = REFUSAL_FILE in keys and there.room == room
    return keys <= {PLAN_FILE, RECIPE_FILE} or (is_refused and not keys & made)


def _difference(there: Plan, plan: Plan) -> str:
    if there.room != plan.room:
        return f"it was made by {there.room}"
    changed = [
        f"{key} was {there.recipe.get(key)!r}, is {plan.recipe.get(key)!r}"
        for key in sorted(there.recipe.keys() | plan.recipe.keys())
        if there.recipe.get(key) != plan.recipe.get(key)
    ]
    if changed:
        return "; ".join(changed)
    return f"its inputs differ ({len(there.inputs)} files then, {len(plan.inputs)} now, or other content)"


@dataclass(frozen=True)
class SetReader:
    """A complete set at one store."""

    store: Store
    plan: Plan
    card: Card

    @property
    def inputs(self) -> tuple[InputFile, ...]:
        """The parts as a consumer's plan names them, identified by their sha256."""
        return tuple(part_file(p["file"], p["bytes"], p["sha256"]) for p in self.card.content["parts"])

    def local(self, file: InputFile) -> Path:
        """A local path with the part's bytes, checked against its record; an object is fetched into the cache once."""
        return local_copy(self.store, file)


def open_set(url: str, room: str) -> SetReader:
    """The complete set at `url`, made by `room`; StorageError where there is none or it is unfinished, DataGateError
    where its gate has refused it.
    """
    store = open_store(url)
    plan, card = plan_at(store, room), card_at(store)
    if card is None:
        refuse_refused(store, plan)
        raise StorageError(
            f"{url} is unfinished: it has a plan but no {CARD_FILE}; run its draftmill {room} again to go on"
        )
    return SetReader(store, plan, card)
