"""Checkpoints of a training run: folders of files with a marker written last; found, checked and fetched without torch.

    checkpoints/step-00001000/config.json  model.safetensors  optimizer.safetensors  position.json  checkpoint.json
                              masters.safetensors, where model.safetensors is an average of the trained weights

`checkpoint.json` is the marker: bytes and sha256 of every file beside it. A folder without a marker that fits is no
checkpoint: it was cut short, or it is somebody else's.
"""

import hashlib
import re
from pathlib import Path

import msgspec

from draftmill.contracts.cards import PLAN_FILE, canonical_json
from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.cache import cache_folder
from draftmill.storage.local import sweep_drafts, write_atomically
from draftmill.storage.models import CONFIG_FILE
from draftmill.storage.set_files import card_at, plan_at
from draftmill.storage.store import Store, open_store, sha256_of

CHECKPOINTS = "checkpoints"
MARKER_FILE = "checkpoint.json"
WEIGHTS_FILE = "model.safetensors"
MASTERS_FILE = "masters.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
POSITION_FILE = "position.json"
# What only a run that goes on reads: nobody else fetches it.
_FOR_TRAINING = {MASTERS_FILE, OPTIMIZER_FILE}
_FOLDER = re.compile(rf"{CHECKPOINTS}/step-(\d{{8}})/")


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint as its marker names it."""

    name: str
    bytes: int
    sha256: str


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a checkpoint complete: the step it stands at, the plan it was trained for, and its files."""

    step: int
    plan: str
    files: tuple[CheckpointFile, ...]


def step_folder(step: int) -> str:
    """The key of a step's folder below the run."""
    return f"{CHECKPOINTS}/step-{step:08d}"


def put_checkpoint(stores: tuple[Store, ...], step: int, plan: str, files: dict[str, bytes]) -> None:
    """Writes the files of one checkpoint, its marker last, to every store."""
    named = tuple(CheckpointFile(name=n, bytes=len(d), sha256=sha256_of(d)) for n, d in sorted(files.items()))
    marker = canonical_json(Marker(step=step, plan=plan, files=named))
    for store in stores:
        for name, data in files.items():
            store.put(f"{step_folder(step)}/{name}", data)
        store.put(f"{step_folder(step)}/{MARKER_FILE}", marker)


def steps_on(store: Store) -> list[int]:
    """Steps of the folders that stand in a run, complete or not, ascending."""
    found = map(_FOLDER.match, store.sizes())
    return sorted({int(match[1]) for match in found if match})


def refuse_blocked(store: Store) -> None:
    """StorageError where something else stands in a local run where a checkpoint's folder belongs: it could not be
    written there, hours later, nor read from a disk that is not mounted.
    """
    place = store.folder and store.folder / CHECKPOINTS
    for path in sorted(place.iterdir()) if place and place.is_dir() else ():
        if _FOLDER.match(f"{CHECKPOINTS}/{path.name}/") and not path.is_dir():
            what = "a link to nothing" if path.is_symlink() and not path.exists() else "no folder"
            raise StorageError(
                f"{path} is {what}, and a checkpoint's folder belongs there: remove or rename it, or mount what it "
                "leads to, and run the same command again"
            )


def find_marker(store: Store, step: int) -> Marker | None:
    """The marker of a step; None where there is none, or where it is not a marker of that step."""
    data = store.find(f"{step_folder(step)}/{MARKER_FILE}")
    marker = None if data is None else _decoded(data)
    return marker if marker is not None and marker.step == step else None


def _decoded(data: bytes) -> Marker | None:
    try:
        return msgspec.json.decode(data, type=Marker)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_checkpoint(store: Store, marker: Marker) -> dict[str, bytes] | None:
    """The files of a checkpoint by name, checked against the marker; None where one is missing, cut or changed."""
    files = {}
    for file in marker.files:
        data = store.find(f"{step_folder(marker.step)}/{file.name}")
        if data is None or sha256_of(data) != file.sha256:
            return None
        files[file.name] = data
    return files


def holds_checkpoint(store: Store, marker: Marker) -> bool:
    """Whether a store has this very marker, and beside it files of the lengths it names."""
    if find_marker(store, marker.step) != marker:
        return False
    sizes = store.sizes()
    return all(sizes.get(f"{step_folder(marker.step)}/{file.name}") == file.bytes for file in marker.files)


def sweep_checkpoints(store: Store) -> None:
    """Removes what processes of this host that are gone have left half-written in the folders of a local run."""
    if store.folder is not None:
        entries = (store.folder / CHECKPOINTS).glob("*")
        for folder in (entry for entry in entries if entry.is_dir() and not entry.is_symlink()):
            sweep_drafts(folder)
            if not any(folder.iterdir()):
                folder.rmdir()


def remove_checkpoints(store: Store, steps: list[int]) -> None:
    """Removes the folders of these steps, markers first, so that a folder cut half-way is no checkpoint any more."""
    listing = store.sizes()
    for step in steps:
        folder = f"{step_folder(step)}/"
        keys = [key for key in listing if key.startswith(folder)]
        store.delete(sorted(keys, key=lambda key: key != folder + MARKER_FILE))


def find_checkpoint(url: str, step: int | None = None) -> Path:
    """A local folder with the newest complete checkpoint of the run at `url`, or with that of `step`, checked.

    `url` may itself be a checkpoint or an exported drafter (a folder with config.json and model.safetensors).
    Checkpoints on an object store are fetched into the cache, without what only training on needs. Checkpoints of
    another plan than the run's are nobody's; StorageError where the newest is older than the run's card says.
    """
    store = open_store(url)
    if store.find(MARKER_FILE) is None and store.find(CONFIG_FILE) is not None:
        return _exported(store)
    if (data := store.find(MARKER_FILE)) is not None:
        if (marker := _decoded(data)) is None:
            raise InputError(f"{store.url}/{MARKER_FILE} is no marker of a checkpoint: it was cut or changed")
        return _local(store, "", marker)
    plan = None if store.find(PLAN_FILE) is None else plan_at(store, "train").hash
    steps = [s for s in reversed(steps_on(store)) if step is None or s == step]
    for candidate in steps:
        marker = find_marker(store, candidate)
        if marker is not None and plan in (None, marker.plan):
            if step is None:
                _refuse_older_than_card(store, marker)
            return _local(store, f"{step_folder(candidate)}/", marker)
    there = ", ".join(map(str, steps_on(store))) or "none"
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise InputError(f"{url} holds no complete {wanted} (steps there: {there}); run its draftmill train again")


def _refuse_older_than_card(store: Store, newest: Marker) -> None:
    """A finished run is taken at its end, or not by its own name."""
    card = card_at(store)
    if card is None or card.content.get("plan") != newest.plan:
        return
    last = card.content["num_steps"]
    if newest.step < last:
        raise StorageError(
            f"{store.url}: the checkpoint of step {last}, with which the run ended, is gone or has no marker that "
            f"fits; run its draftmill train again, or name an older one's folder ({step_folder(newest.step)})"
        )


def _local(store: Store, prefix: str, marker: Marker) -> Path:
    """The checkpoint's folder, all files but those for training on checked; fetched where the store is not local."""
    identity = hashlib.sha256(canonical_json(marker)).hexdigest()
    folder = store.folder / prefix if store.folder else cache_folder() / "checkpoints" / identity
    for file in marker.files:
        if file.name in _FOR_TRAINING:
            continue
        path = folder / file.name
        if store.folder is None and not path.is_file():
            write_atomically(path, store.get(prefix + file.name))
        if not path.is_file() or sha256_of(path) != file.sha256:
            raise StorageError(
                f"{store.url}/{prefix}{file.name} is missing, cut or changed: it is not what {MARKER_FILE} says; "
                "remove this checkpoint's folder and run its draftmill train again"
            )
    return folder


def _exported(store: Store) -> Path:
    if store.find(WEIGHTS_FILE) is None:
        raise InputError(f"{store.url} holds a {CONFIG_FILE} but no {WEIGHTS_FILE}: it is not a drafter's folder")
    if store.folder:
        return store.folder
    files = {name: store.get(name) for name in (CONFIG_FILE, WEIGHTS_FILE)}
    identity = hashlib.sha256(b"".join(sha256_of(data).encode() for data in files.values())).hexdigest()
    folder = cache_folder() / "checkpoints" / identity
    for name, data in files.items():
        write_atomically(folder / name, data)
    return folder
