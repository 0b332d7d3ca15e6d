"""What the files of a set say, whoever asks: its plan, a part's record, the card, and why its gate refused it."""

from typing import TypeVar

import msgspec

from draftmill.contracts.cards import (
    CARD_FILE,
    PLAN_FILE,
    REFUSAL_FILE,
    Card,
    InputFile,
    PartRecord,
    Plan,
    Refusal,
    record_file,
)
from draftmill.contracts.errors import DataGateError, StorageError
from draftmill.storage.fetch import SHA256
from draftmill.storage.store import Store

T = TypeVar("T", Plan, PartRecord, Card)


def refuse_refused(store: Store, plan: Plan) -> None:
    """DataGateError where a set that has no card has none because its gate refused it."""
    if (refusal := refusal_at(store, plan)) is not None:
        raise DataGateError(
            f"{store.url} is unfinished, because the gate of draftmill {plan.room} refused it: {refusal}"
        )


def refusal_at(store: Store, plan: Plan) -> str | None:
    """Why the gate refused the set of this plan; None where it has not, or is being asked again."""
    refusal = refusal_in(store)
    return refusal.reason if refusal is not None and refusal.plan == plan.hash else None


def refusal_in(store: Store) -> Refusal | None:
    """The refusal that stands in a set's folder; None where there is none, or one that was damaged: the next run tells
    again.
    """
    try:
        return msgspec.json.decode(store.find(REFUSAL_FILE) or b"", type=Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def part_file(name: str, size: int, sha256: str) -> InputFile:
    """The file of a part, as a consumer's plan names it: by its content."""
    return InputFile(key=name, size=size, identity=SHA256 + sha256)


def plan_at(store: Store, room: str) -> Plan:
    """The plan of the set that `room` makes or has made there; StorageError where it is none of that room."""
    data = store.find(PLAN_FILE)
    if data is None:
        raise StorageError(f"{store.url} holds no {PLAN_FILE}: it is not the output of draftmill {room}")
    plan = decoded(data, Plan, store, PLAN_FILE)
    if plan.room != room:
        raise StorageError(
            f"{store.url} was made by draftmill {plan.room}, but the output of draftmill {room} is wanted here"
        )
    return plan


def card_at(store: Store) -> Card | None:
    """The card of a set that is complete; None where it is not."""
    data = store.find(CARD_FILE)
    return None if data is None else decoded(data, Card, store, CARD_FILE)


def record_at(store: Store, name: str, plan: Plan) -> PartRecord | None:
    """The record of a part of this plan, if it is complete: one of another plan is a leftover."""
    data = store.find(record_file(name))
    record = None if data is None else decoded(data, PartRecord, store, record_file(name))
    return record if record is not None and record.plan == plan.hash else None


def decoded(data: bytes, kind: type[T], store: Store, name: str) -> T:
    """What a plan, record or card file holds; StorageError where it is cut or somebody else's."""
    try:
        found = msgspec.json.decode(data, type=kind)
        if isinstance(found, Card) and not isinstance(found.content.get("parts"), list):
            raise msgspec.ValidationError("it names no parts")
        return found
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # A plan is all that says what the parts are of; a record or the card is made again where it is missing.
        cure = "the folder and make the set again" if kind is Plan else "this file and run the same command again"
        raise StorageError(
            f"{store.url}/{name} is not a {kind.__name__.lower()} of draftmill ({error}): it was cut or changed, or is "
            f"somebody else's; name another folder, or remove {cure}"
        ) from error
