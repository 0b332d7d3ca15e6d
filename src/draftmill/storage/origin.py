"""Which target a drafter was trained for, as the plan and recipe of its run say, or the card of its export."""

import re
from contextlib import suppress
from typing import Any

import msgspec

from draftmill.contracts.cards import EXPORT_CARD_FILE, PLAN_FILE, RECIPE_FILE
from draftmill.storage.checkpoints import CHECKPOINTS
from draftmill.storage.set_files import plan_at
from draftmill.storage.store import Store, find_store, open_store

# A checkpoint named by its own folder: what stands before this is its run.
_IN_RUN = re.compile(rf"/{CHECKPOINTS}/step-\d+$")


class TrainedFor(msgspec.Struct, frozen=True, kw_only=True):
    """A target, as the run knew it that trained a drafter for it."""

    name: str | None
    """As it was given: a folder, a hub id, or package:NAME; None where the run's recipe is gone."""
    fingerprint: str
    """Of its config and weights (`models.fingerprint`)."""


class _Given(msgspec.Struct):
    """What of a run's recipe is read."""

    target: str


class _Exported(msgspec.Struct):
    """What of an export's card is read."""

    content: dict[str, Any]


def trained_for(url: str) -> TrainedFor | None:
    """The target of the drafter at `url`, which is an export, a run, or a checkpoint in one; None where none says."""
    store = find_store(url)
    card = None if store is None else store.find(EXPORT_CARD_FILE)
    return target_of_run(url) if card is None else _on_card(card)


def target_of_run(url: str) -> TrainedFor | None:
    """The target of the run at `url`, or that the checkpoint there lies in; None where it lies in none."""
    if (store := find_store(url)) is None:
        return None
    place = store.url if store.folder is None else str(store.folder.resolve())  # it may be named by a link
    run = open_store(_IN_RUN.sub("", place))
    if run.find(PLAN_FILE) is None:
        return None
    fingerprint = plan_at(run, "train").recipe.get("target")
    return TrainedFor(name=_name_in(run), fingerprint=fingerprint) if isinstance(fingerprint, str) else None


def _name_in(run: Store) -> str | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(run.find(RECIPE_FILE) or b"", type=_Given).target
    return None


def _on_card(card: bytes) -> TrainedFor | None:
    """What a card says, however old or damaged it is."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        said = msgspec.json.decode(card, type=_Exported).content.get("target")
        return msgspec.convert(said, TrainedFor | None)
    return None
