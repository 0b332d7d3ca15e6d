"""What a run left behind: the card of every room found below its folder, and the training metrics."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from draftmill.contracts.cards import CARD_FILE, EXPORT_CARD_FILE, Card
from draftmill.contracts.errors import InputError
from draftmill.storage.store import Store

# In the order of the line.
ROOMS = ("generate", "tokenize", "train", "evaluate", "export")
METRICS_FILE = "metrics.jsonl"

Metric = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """One card and the folder it lies in, relative to the run."""

    folder: str
    card: Card


@dataclass(frozen=True)
class RunStory:
    """All that a run left; rooms that left nothing are in `missing`."""

    url: str
    found: tuple[Found, ...]
    metrics: dict[str, tuple[Metric, ...]]
    """Of every training run that is there, finished or not, by its folder."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Rooms without a card below the run."""
        return tuple(room for room in ROOMS if not self.of(room))

    def of(self, room: str) -> list[Found]:
        """The cards of one room, by folder."""
        return [found for found in self.found if found.card.room == room]


def collect(store: Store) -> RunStory:
    """Reads every card below the store's folder; InputError where there is none."""
    keys = sorted(store.sizes())
    cards = [key for key in keys if key.rsplit("/", 1)[-1] in (CARD_FILE, EXPORT_CARD_FILE)]
    found = [Found(key.rpartition("/")[0], _card(store, key)) for key in cards]
    found.sort(key=lambda f: (ROOMS.index(f.card.room) if f.card.room in ROOMS else len(ROOMS), f.folder))
    metrics = [key for key in keys if key.rsplit("/", 1)[-1] == METRICS_FILE]
    if not found and not metrics:
        raise InputError(f"{store.url} holds no card of any room and no {METRICS_FILE}: name the folder of a run")
    steps = {key.rpartition("/")[0]: _metrics(store.get(key)) for key in sorted(metrics)}
    return RunStory(store.url, tuple(found), steps)


def _card(store: Store, key: str) -> Card:
    try:
        return msgspec.json.decode(store.get(key), type=Card)
    except msgspec.DecodeError as error:
        raise InputError(f"{store.url}/{key} is not a card: {error}") from error


def _metrics(data: bytes) -> tuple[Metric, ...]:
    """The lines of steps; a last one without its line end is still being written, and what is no step's is nobody's."""
    found: list[Metric] = []
    for line in data[: data.rfind(b"\n") + 1].split(b"\n"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            found.append(msgspec.json.decode(line, type=Metric))
    return tuple(metric for metric in found if isinstance(metric.get("step"), int) and "loss" in metric)
