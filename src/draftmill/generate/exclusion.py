"""Decontamination: prompts that share a run of tokens with an evaluation set are left out, and say with which row.

Runs lie within one message, and a message shorter than a run is looked for as a whole. System messages are left out on
both sides: half a data set may begin with the same one. An index holds one number a run of the evaluation sets, so
memory depends on them alone, not on the prompts.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftmill.chat.chat import Chat
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import Message, RowError, read_row
from draftmill.storage.row_files import RowFile

logger = logging.getLogger(__name__)

EXCLUDED = "shares a run of tokens with an evaluation set"

Ids = NDArray[np.int32]
Hashes = NDArray[np.uint64]


class Exclusion:
    """Finds runs of `run_tokens` tokens, and shorter messages as a whole, that stand in an evaluation set."""

    def __init__(self, files: Sequence[RowFile], chat: Chat, run_tokens: int) -> None:
        self._chat = chat
        # Odd and spread over 64 bits: a run's number is its ids' weighted sum, wrapped.
        self._weights = np.random.default_rng(0).integers(0, 1 << 63, run_tokens, np.uint64) * np.uint64(2) + np.uint64(
            1
        )
        texts = [(f"{file.file.key} line {line}", ids) for file in files for line, ids in self._texts(file)]
        self._short = {ids.tobytes(): place for place, ids in reversed(texts) if len(ids) < run_tokens}
        self._ids: list[Ids] = [ids for _, ids in texts]
        self._places = [place for place, _ in texts]
        hashes = [self._hashes(ids) for ids in self._ids]
        owners = np.repeat(np.arange(len(texts), dtype=np.int32), [len(h) for h in hashes])
        self._hashes_sorted, first = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]), return_index=True)
        self._owners = owners[first]

    def find(self, messages: Iterable[Message]) -> str | None:
        """Where the first shared run stands, e.g. `gsm8k.jsonl line 17`; None where there is none."""
        for message in messages:
            if message["role"] == "system" or not message["content"]:
                continue
            ids = np.asarray(self._chat.encode(message["content"]), np.int32)
            if place := self._short.get(ids.tobytes()):
                return place
            hashes = self._hashes(ids)
            places = np.searchsorted(self._hashes_sorted, hashes)
            places[places == len(self._hashes_sorted)] = 0
            for start in np.flatnonzero(self._hashes_sorted[places] == hashes) if len(self._hashes_sorted) else ():
                owner = int(self._owners[places[start]])
                if _holds(self._ids[owner], ids[start : start + len(self._weights)]):
                    return self._places[owner]
        return None

    def _hashes(self, ids: Ids) -> Hashes:
        """One number for each run in the text."""
        if len(ids) < len(self._weights):
            return np.empty(0, np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), len(self._weights))
        return (windows * self._weights).sum(axis=1, dtype=np.uint64)

    def _texts(self, file: RowFile) -> Iterator[tuple[int, Ids]]:
        """The ids of every text of an evaluation set; InputError where a line holds none."""
        count = num_short = 0
        for line, data in file.lines():
            texts = _texts(data)
            if not texts:
                raise InputError(
                    f"{file.path} line {line}: no text of an evaluation row in it; --exclude reads JSON lines"
                )
            for text in texts:
                count += 1
                ids = np.asarray(self._chat.encode(text), np.int32)
                num_short += len(ids) < len(self._weights)
                yield line, ids
        if not count:
            raise InputError(f"{file.path}: no rows; --exclude names evaluation sets")
        logger.info("%s: %d texts of an evaluation set", file.file.key, count)
        if num_short:
            told = (
                "%s: %d texts are shorter than --exclude-tokens %d: they exclude prompts equal to them, and no others"
            )
            logger.warning(told, file.file.key, num_short, len(self._weights))


def _texts(data: bytes) -> list[str]:
    """What an evaluation row says: its messages, or every text of an object in another form."""
    try:
        messages = read_row(data).messages
    except RowError:
        return [text for text in _strings(data) if text.strip()]
    return [m["content"] for m in messages if m["role"] != "system" and (m["content"] or "").strip()]


def _strings(data: bytes) -> Iterator[str]:
    try:
        waiting: list[Any] = [msgspec.json.decode(data)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _holds(ids: Ids, run: Ids) -> bool:
    """Whether the run itself stands in the text, and not only its number."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(run))
    return bool((windows == run).all(axis=1).any())
