"""`draftmill inspect`: the figures of any tokenized set, one of its samples, or the gate's verdict."""

import itertools
import sys
from typing import Any

import numpy as np

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.errors import DataGateError, InputError, RecipeError
from draftmill.settings.inspect import InspectSettings
from draftmill.storage.models import locate
from draftmill.tokenize.existing import Existing, ExistingSet, open_existing
from draftmill.tokenize.figures import PartStats, as_content, count, fingerprint, holding, repeats
from draftmill.tokenize.gate import advise, judge
from draftmill.tokenize.histogram import show
from draftmill.tokenize.part import DUPLICATE

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def run(settings: InspectSettings) -> dict[str, Any]:
    """Shows the set (or one sample of it) on stderr; returns its figures."""
    existing = open_existing(settings.input)
    if settings.dry_run:
        return {"room": "inspect", "dry_run": True, "recipe": settings.model_dump(mode="json"), "left": []}
    if not existing.is_finished:
        _tell_unfinished(existing)
    if settings.row is not None:
        return _show_sample(existing, settings.row, settings.tokenizer)
    figures = _counted(existing, settings.mask_id)
    show(figures, settings.input)
    advise(figures, existing.content.get("recipe", {}).get("turns"))
    if settings.gate and figures.samples == 0:
        raise DataGateError(f"the gate refuses {settings.input}: it holds no sample")
    if settings.gate:
        judge(figures, settings, settings.input)
        sys.stderr.write("the gate lets it pass\n")
    state = {"finished": existing.is_finished, "refused": existing.refusal}
    return {"room": "inspect", "input": settings.input, **state, "tokens": figures.tokens, **as_content(figures)}


def _tell_unfinished(existing: ExistingSet) -> None:
    """Says on stderr that there is no card, why, and what is looked at instead."""
    why = "is unfinished" if existing.refusal is None else f"was refused by its gate: {existing.refusal}"
    sys.stderr.write(f"{existing.store.url} {why}\nparts there to be looked at: {len(existing.files):,}\n")


def _counted(existing: ExistingSet, mask_id: int | None) -> PartStats:
    """The samples are counted anew; what is known of their rows is the card's, where there is one."""
    mask_id = mask_id if mask_id is not None else existing.content.get("recipe", {}).get("mask_id")
    seen = [
        (
            len(ids),
            np.count_nonzero(mask),
            truncated,
            fingerprint(ids),
            holding(ids, np.array([len(ids)], np.int32), mask_id),
        )
        for _, ids, mask, truncated in existing.samples()
    ]
    lengths, supervised, truncated, fingerprints, with_mask = zip(*seen, strict=True) if seen else ((),) * 5
    dropped = existing.content.get("dropped", {})
    figures = count(
        np.array(lengths, np.int32),
        np.array(supervised, np.int32),
        np.array(truncated, np.bool_),
        rows=existing.content.get("rows_in", 0),
        dropped=sum(dropped.values()) - dropped.get(DUPLICATE, 0),
        duplicate_rows=dropped.get(DUPLICATE, 0),
        thinking_rows=existing.content.get("thinking_rows", 0),
        answers=existing.content.get("answers", 0),
        answers_unsupervised=existing.content.get("answers_unsupervised", 0),
        differing=existing.content.get("rows_that_differed", 0),
    )
    figures.duplicate_samples, figures.with_mask = repeats(np.array(fingerprints, np.uint64)), sum(with_mask)
    return figures


def _show_sample(existing: ExistingSet, row: int, tokenizer: str | None) -> dict[str, Any]:
    if tokenizer is None:
        raise RecipeError("--row shows text: name the target's --tokenizer too")
    sample = next(itertools.islice(existing.samples(), row, None), None) if row >= 0 else None
    if sample is None:
        num_samples = sum(1 for _ in existing.samples())
        raise InputError(f"{existing.store.url} has no sample {row}: it has {num_samples:,}, numbered from 0")
    chat = open_chat(locate(tokenizer, weights=False))
    sys.stderr.write(marked(sample, chat, colour=sys.stderr.isatty()) + "\n")
    return {
        "room": "inspect",
        "row": row,
        "id": sample.id,
        "tokens": len(sample.input_ids),
        "supervised_tokens": int(sample.loss_mask.sum()),
        "truncated": sample.truncated,
    }


def marked(sample: Existing, chat: Chat, *, colour: bool) -> str:
    """The sample's text with its supervised runs in green, or in brackets where there is no colour."""
    opening, closing = (_GREEN, _PLAIN) if colour else ("⟦", "⟧")
    borders = [0, *(np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist(), len(sample.input_ids)]
    text = ""
    for start, stop in itertools.pairwise(borders):
        run_text = chat.decode(sample.input_ids[start:stop].tolist())
        text += f"{opening}{run_text}{closing}" if sample.loss_mask[start:stop].any() else run_text
    return text
