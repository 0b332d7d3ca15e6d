"""What an evaluation publishes: its plan, and rows of decoded and of walked requests, a few requests a part.

Timings lie beside the parts in files of their own: they differ from run to run, parts do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from draftmill.contracts.cards import InputFile, PartRecord, Plan, PlannedPart
from draftmill.contracts.errors import StorageError
from draftmill.speculation.requests import Material, Request
from draftmill.storage.sets import SetWriter
from draftmill.storage.store import sha256_of

# A killed evaluation loses the work of one part: a few seconds.
DECODED_PER_PART = 2
WALKED_PER_PART = 16
DECODED, WALKED = "decoded", "walked"


class Tie(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers that first differ where the two best logits nearly equal each other: excused, and counted."""

    between: str
    position: int
    token_ids: tuple[int, int]
    gap: float


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's figures: tokens per cycle by the walk and, where it was decoded, by decoding."""

    id: str
    family: str
    walked: tuple[int, ...]
    decoded: tuple[int, ...] | None = None
    untrained: tuple[int, ...] | None = None
    ties: tuple[Tie, ...] = ()


@dataclass
class Spent:
    """Wall and CPU seconds, and passes of the target."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    passes: int = 0

    def add(self, other: "Spent") -> None:
        """Counts another's seconds and passes in."""
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s
        self.passes += other.passes


Spending = dict[str, Spent]


@dataclass(frozen=True)
class Work:
    """Which requests are decoded, with and without the untrained drafter, and which are only walked."""

    decoded: tuple[Request, ...]
    untrained: frozenset[str]
    walked: tuple[Request, ...]

    def parts(self) -> tuple[PlannedPart, ...]:
        """The parts, the decoded ones first: they refuse what is not lossless before the rest is worked at."""
        return (
            *_cut(DECODED, self.decoded, DECODED_PER_PART),
            *_cut(WALKED, self.walked, WALKED_PER_PART),
        )


def _cut(kind: str, requests: Sequence[Request], size: int) -> list[PlannedPart]:
    starts = range(0, len(requests), size)
    return [
        PlannedPart(name=f"{kind}-{index:05d}", inputs=tuple(r.id for r in requests[start : start + size]))
        for index, start in enumerate(starts)
    ]


def make_plan(recipe: dict, material: Material, drafter: Sequence[InputFile], work: Work) -> Plan:
    """The plan: a set of its own for every recipe, drafter and input."""
    return Plan(room="evaluate", recipe=recipe, inputs=(*drafter, *material.files), parts=work.parts())


def publish(writer: SetWriter, name: str, rows: Sequence[Measured], spending: Spending) -> None:
    """Publishes one part: its timings, its rows, then its record."""
    data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    record = PartRecord(
        name=name,
        file=f"{name}.jsonl",
        rows_in=len(rows),
        rows=len(rows),
        tokens=sum(sum(row.walked) for row in rows),
        bytes=len(data),
        sha256=sha256_of(data),
        plan=writer.plan.hash,
        stats={"ties": sum(len(row.ties) for row in rows)},
    )
    writer.publish_file(_timing_file(name), msgspec.json.encode(spending))
    writer.publish(record, data)


def read_back(writer: SetWriter) -> tuple[list[Measured], Spending]:
    """Rows and summed timings of all parts, those of earlier runs included; StorageError for a part that changed."""
    rows: list[Measured] = []
    spending: Spending = {}
    store = writer.stores[0]
    for record in writer.records().values():
        data = store.get(record.file)
        if sha256_of(data) != record.sha256:
            raise StorageError(f"{store.url}/{record.file} is not what its record says: remove both and run again")
        rows += [msgspec.json.decode(line, type=Measured) for line in data.split(b"\n") if line]
        for name, spent in msgspec.json.decode(store.get(_timing_file(record.name)), type=Spending).items():
            spending.setdefault(name, Spent()).add(spent)
    return rows, spending


def _timing_file(name: str) -> str:
    return f"timings/{name}.json"
