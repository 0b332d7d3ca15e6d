"""Plans, part records and cards: how one room tells the next what it made.

A room publishes `plan.json` first, then for each part its data file and after it the record (`part-00012.json`), and
`card.json` last. A part is complete when its record exists; a set is complete when its card exists.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

PLAN_FILE = "plan.json"
CARD_FILE = "card.json"
# Beside the plan of a set that its gate has refused, until it is made again.
REFUSAL_FILE = "refused.json"
# A training run's resolved settings, and the card inside an exported folder, where card.json would be an engine's.
RECIPE_FILE = "recipe.json"
EXPORT_CARD_FILE = "draftmill.json"


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file a room reads: its key below the input URL, bytes, and an identity (`sha256:…` or a store's etag)."""

    key: str
    size: int
    identity: str


class PlannedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part to make: its name and the inputs (keys, or pieces of them) it is made of, in order."""

    name: str
    inputs: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a room is going to make. `recipe` holds the settings that affect the output, and nothing else."""

    room: str
    recipe: dict[str, Any]
    inputs: tuple[InputFile, ...]
    parts: tuple[PlannedPart, ...]

    @property
    def hash(self) -> str:
        """The identity of the set: sha256 over the canonical JSON of the plan, 64 hex digits."""
        return content_hash(self)


class Dropped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row that did not reach the output: where it stood, its id where it had one, and why.

    `reason` is a short fixed phrase that rows are counted by; `detail` what was special about this one.
    """

    file: str
    line: int
    id: str | None
    reason: str
    detail: str = ""


def count_reasons(rows: Iterable[Dropped]) -> Counter[str]:
    """Rows left out, by reason."""
    return Counter(row.reason for row in rows)


def told_reasons(counts: Counter[str]) -> str:
    """Counts by reason for people, the commonest first: `broken JSON: 1,024, no messages: 3`."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in counts.most_common())


class AsideFile(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a part that were answered but are kept out of the set, each with its reason, in a file of their own."""

    file: str
    rows: int
    bytes: int
    sha256: str
    reasons: dict[str, int]


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One complete part. `rows_in` = `rows` + those of `set_aside` + len(`dropped`) + len(`failed`).

    `failed` rows got no answer and may get one when they are asked again. `stats` is the room's own figures, summable.
    """

    name: str
    file: str
    rows_in: int
    rows: int
    tokens: int
    bytes: int
    sha256: str
    plan: str
    stats: dict[str, Any] = {}
    dropped: tuple[Dropped, ...] = ()
    set_aside: AsideFile | None = None
    failed: tuple[Dropped, ...] = ()

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Every data file of the part with its bytes."""
        aside = () if self.set_aside is None else ((self.set_aside.file, self.set_aside.bytes),)
        return ((self.file, self.bytes), *aside)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why the gate refused the set of a plan: what tells it from one that is only unfinished."""

    plan: str
    reason: str
    shard: str | None = None
    """Which of several runs over one set it was asked by; None: by one that makes all of it."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A complete set. `content` depends on inputs and settings alone; `run` says who made it, and is never hashed."""

    room: str
    content: dict[str, Any]
    content_hash: str
    run: dict[str, Any]


def part_name(index: int) -> str:
    """The name of part `index`, as used for its data file and its record."""
    return f"part-{index:05d}"


def record_file(name: str) -> str:
    """The file name of a part's record."""
    return f"{name}.json"


def canonical_json(value: Any) -> bytes:
    """The one JSON form that is hashed and published: keys sorted, no spaces, a newline at the end."""
    return msgspec.json.encode(value, order="sorted") + b"\n"


def content_hash(value: Any) -> str:
    """sha256 over the canonical JSON of `value`, 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def make_card(
    room: str, plan: Plan, records: tuple[PartRecord, ...], content: dict[str, Any], run: dict[str, Any]
) -> Card:
    """The card of a complete set: parts, totals and drops from its records, and the room's own figures `content`."""
    whole = {
        "plan": plan.hash,
        "recipe": plan.recipe,
        "recipe_hash": content_hash(plan.recipe),
        "inputs": plan.inputs,
        "parts": [_part_on_card(record) for record in records],
        "rows_in": sum(r.rows_in for r in records),
        "rows": sum(r.rows for r in records),
        "tokens": sum(r.tokens for r in records),
        "bytes": sum(r.bytes for r in records),
        "dropped": count_reasons(d for r in records for d in r.dropped),
        "dropped_rows": [d for r in records for d in r.dropped],
        **content,
    }
    # As it will be read back, so that a fresh card equals a published one.
    whole = msgspec.json.decode(canonical_json(whole))
    return Card(room=room, content=whole, content_hash=content_hash(whole), run=run)


def _part_on_card(record: PartRecord) -> dict[str, Any]:
    r = record
    shown = {"name": r.name, "file": r.file, "rows": r.rows, "tokens": r.tokens, "bytes": r.bytes, "sha256": r.sha256}
    aside = {} if r.set_aside is None else {"set_aside": r.set_aside}
    return {**shown, **aside, **({"failed": len(r.failed)} if r.failed else {})}
