"""Where the models of an evaluation lie and what identifies them, found without loading any of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from draftmill.contracts.cards import Dropped, InputFile
from draftmill.contracts.errors import InputError
from draftmill.evaluate.parts import Work
from draftmill.model.shape import DrafterShape
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.speculation.requests import Material, Request, choose, fitting
from draftmill.storage.checkpoints import (
    CONFIG_FILE,
    MARKER_FILE,
    WEIGHTS_FILE,
    Marker,
    find_checkpoint,
    find_marker,
)
from draftmill.storage.fetch import SHA256
from draftmill.storage.models import fingerprint, locate, read_config, window_tokens
from draftmill.storage.origin import target_of_run
from draftmill.storage.store import open_store, sha256_of

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Sources:
    """The models' folders; `untrained` is the run's step 0, where it is wanted and still there."""

    target: Path
    target_fingerprint: str
    drafter: Path
    untrained: Path | None
    shape: DrafterShape
    step: int | None
    """The optimizer step of the drafter, where its folder says."""
    max_positions: int
    """Tokens in the target's window."""

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files that identify drafter and tokenizer, as the plan names them; the target has its fingerprint."""
        named = [("target", self.target, (TOKENIZER_FILE,))]
        named += [("drafter", self.drafter, (CONFIG_FILE, WEIGHTS_FILE))]
        named += [("untrained", self.untrained, (WEIGHTS_FILE,))] if self.untrained else []
        return tuple(_identified(role, folder / name) for role, folder, names in named for name in names)


def _identified(role: str, path: Path) -> InputFile:
    return InputFile(key=f"{role}/{path.name}", size=path.stat().st_size, identity=SHA256 + sha256_of(path))


def find_sources(target: str, checkpoint: str, with_untrained: bool) -> Sources:
    """The folders of target, drafter and untrained drafter; checkpoints are checked against their markers.

    InputError where the drafter was trained for another target.
    """
    folder = locate(target)
    identity = fingerprint(folder)
    _refuse_another_target(checkpoint, folder, identity)
    drafter = find_checkpoint(checkpoint)
    marker = drafter / MARKER_FILE
    return Sources(
        target=folder,
        target_fingerprint=identity,
        drafter=drafter,
        untrained=_untrained(checkpoint) if with_untrained else None,
        shape=DrafterShape.from_config(read_config(drafter), str(drafter / CONFIG_FILE)),
        step=msgspec.json.decode(marker.read_bytes(), type=Marker).step if marker.is_file() else None,
        max_positions=_max_positions(folder),
    )


def _refuse_another_target(checkpoint: str, folder: Path, identity: str) -> None:
    """InputError where the plan of the checkpoint's run names another target; an export may be tried with any."""
    found = target_of_run(checkpoint)
    if found is not None and found.fingerprint != identity:
        raise InputError(
            f"{checkpoint} was trained for another target ({found.name or 'whose name its run does not say'}, "
            f"{found.fingerprint[:12]}…) than the one in {folder} ({identity[:12]}…): config.json or weights differ; "
            "name the target that it was trained for"
        )


def _untrained(checkpoint: str) -> Path | None:
    return find_checkpoint(checkpoint, 0) if find_marker(open_store(checkpoint), 0) is not None else None


def _max_positions(folder: Path) -> int:
    if (found := window_tokens(folder)) is None:
        raise InputError(f"{folder / CONFIG_FILE} names no max_position_embeddings: the target's window is unknown")
    return found


def share_out(material: Material, settings: EvaluateSettings, sources: Sources) -> tuple[Work, tuple[Dropped, ...]]:
    """Which requests are decoded and which walked, and those that fit neither, with the reason."""
    usable = fitting(material.requests, settings.max_new_tokens, sources.max_positions)
    if not usable:
        raise InputError(
            f"no prompt fits the target's window of {sources.max_positions} tokens with {settings.max_new_tokens} "
            f"more: lower --max-new-tokens, or choose shorter prompts than these {len(material.requests)}"
        )
    chosen = choose(usable, settings.reported_apart, settings.decode_prompts, settings.seed)
    ids = {request.id for request in chosen}
    rest = [request for request in usable if request.id not in ids]
    work = Work(
        decoded=tuple(chosen),
        untrained=frozenset(r.id for r in chosen[: settings.decode_prompts_untrained] if sources.untrained),
        walked=tuple(request for request in rest if request.answer_ids),
    )
    too_long = [request for request in material.requests if request not in usable]
    unanswered = [request for request in rest if not request.answer_ids]
    return work, (
        *material.left_out,
        *_left_out(too_long, "prompt and answer exceed the target's window"),
        *_left_out(unanswered, "no known answer to walk, and not chosen for decoding"),
    )


def _left_out(requests: Sequence[Request], reason: str) -> list[Dropped]:
    return [Dropped(file="", line=0, id=request.id, reason=reason) for request in requests]
