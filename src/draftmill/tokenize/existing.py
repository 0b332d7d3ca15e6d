"""Any tokenized set as it lies: one of ours, checked against its card, or a folder that datasets.load_from_disk reads.

A stranger's set needs no plan and no card of ours; it needs `input_ids` and one column that says what is supervised.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.contracts.cards import PLAN_FILE, InputFile, Plan, count_reasons
from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.fetch import local_copy
from draftmill.storage.set_files import card_at, part_file, plan_at, refusal_at
from draftmill.storage.sets import SetReader, SetWriter
from draftmill.storage.store import Store, open_store
from draftmill.tokenize.figures import as_content, figures_of, total
from draftmill.tokenize.ledger import decode_made, made_file

STATE_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"
MASK_COLUMNS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
_IGNORED_LABEL = -100
_MAX_ID = (1 << 31) - 1

_Known = TypeVar("_Known", "_State", "_Splits")


class Existing(NamedTuple):
    """One sample of an existing set."""

    id: str | None
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    truncated: bool


@dataclass(frozen=True)
class ExistingSet:
    """The shards of a set, in order."""

    store: Store
    files: tuple[InputFile, ...]
    content: dict[str, Any]
    """What its card tells, where it is one of ours; what its parts tell, where it has none yet."""
    is_finished: bool = True
    refusal: str | None = None
    """Why the gate of tokenize has refused it."""

    def samples(self) -> Iterator[Existing]:
        """Every sample, shard by shard; StorageError naming a shard that is cut, InputError for columns we lack."""
        for file in self.files:
            yield from shard_samples(local_copy(self.store, file), file.key)


def open_existing(url: str) -> ExistingSet:
    """The set at `url`; rows of a stranger's set are its samples, none of them dropped."""
    store = open_store(url)
    if store.find(PLAN_FILE) is not None:
        plan, card = plan_at(store, "tokenize"), card_at(store)
        if card is None:
            return _as_far_as_made(store, plan)
        return ExistingSet(store, SetReader(store, plan, card).inputs, card.content)
    if (state := store.find(STATE_FILE)) is None:
        raise InputError(f"{url} holds neither {PLAN_FILE} nor {STATE_FILE}{_hint(store)}")
    named = [entry.filename for entry in _decoded(state, _State, f"{url}/{STATE_FILE}").data_files]
    listing = {file.key: file for file in store.files()}
    if lost := [name for name in named if name not in listing]:
        raise StorageError(f"{url}/{STATE_FILE} names {', '.join(lost)}, but no such file is there")
    return ExistingSet(store, tuple(listing[name] for name in named), {})


def _as_far_as_made(store: Store, plan: Plan) -> ExistingSet:
    """A set without a card: its parts that are there, those included that wait for a record or were refused one."""
    records = SetWriter(plan, (store,)).records()
    others = store.find_all(made_file(part.name) for part in plan.parts if part.name not in records)
    kept = (decode_made(data, plan.hash) for data in others.values())
    records |= {made.record.name: made.record for made in kept if made is not None}
    there = [records[part.name] for part in plan.parts if part.name in records]
    content = {
        **as_content(total(map(figures_of, there))),
        "recipe": plan.recipe,
        "rows_in": sum(record.rows_in for record in there),
        "dropped": count_reasons(drop for record in there for drop in record.dropped),
    }
    files = tuple(part_file(record.file, record.bytes, record.sha256) for record in there)
    return ExistingSet(store, files, content, is_finished=False, refusal=refusal_at(store, plan))


def _hint(store: Store) -> str:
    splits = store.find(SPLITS_FILE)
    if splits is None:
        return ": name a tokenized set, or a folder saved with datasets' save_to_disk"
    found = _decoded(splits, _Splits, f"{store.url}/{SPLITS_FILE}").splits
    return f"; it is a DatasetDict: name one of its folders, {' or '.join(found)}"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """What of state.json is read."""

    data_files: list[_File] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    """What of dataset_dict.json is read."""

    splits: list[str]


def _decoded(data: bytes, kind: type[_Known], name: str) -> _Known:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{name} is not what datasets writes ({error}): save the set again") from error


def shard_samples(path: Path, key: str) -> Iterator[Existing]:
    """The samples of one shard; `key` names it in errors."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                yield from _samples_of_batch(batch, key)
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(f"{key} is not a whole Arrow stream (cut, or still being written?): {error}") from error


def _samples_of_batch(batch: pa.RecordBatch, key: str) -> Iterator[Existing]:
    names: Sequence[str] = batch.schema.names
    mask_name = next((name for name in MASK_COLUMNS if name in names), None)
    if "input_ids" not in names or mask_name is None:
        raise InputError(
            f"{key} has the columns {', '.join(names)}; wanted are input_ids and one of {', '.join(MASK_COLUMNS)}"
        )
    ids, masks = (_lists(batch.column(name), name, key) for name in ("input_ids", mask_name))
    row_ids = batch.column("id").to_pylist() if "id" in names else [None] * batch.num_rows
    cut = batch.column("truncated").to_pylist() if "truncated" in names else [False] * batch.num_rows
    for row_id, input_ids, mask, truncated in zip(row_ids, ids, masks, cut, strict=True):
        if len(input_ids) != len(mask):
            raise InputError(f"{key}: a sample has {len(input_ids)} input_ids, but {len(mask)} values in {mask_name}")
        if len(input_ids) and not 0 <= input_ids.min() <= input_ids.max() <= _MAX_ID:
            raise InputError(f"{key}: token ids from {input_ids.min()} to {input_ids.max()}; ids are 0 to {_MAX_ID}")
        supervised = mask != _IGNORED_LABEL if mask_name == "labels" else mask.astype(np.bool_)
        yield Existing(None if row_id is None else str(row_id), input_ids.astype(np.int32), supervised, bool(truncated))


def _lists(column: Any, name: str, key: str) -> Iterator[NDArray[Any]]:
    """Each list of a column of lists of numbers or truth values; InputError for any other column, and for nulls."""
    kind, types = column.type, pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)):
        raise InputError(f"{key}: the column {name} is of {kind}; lists of whole numbers are wanted")
    if types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    if nulls := column.null_count + column.values.null_count:
        raise InputError(f"{key}: {nulls:,} values of the column {name} are null: make the set anew")
    ends = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    return (values[start:stop] for start, stop in itertools.pairwise(ends))
