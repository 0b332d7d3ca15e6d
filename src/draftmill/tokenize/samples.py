"""One row of conversation -> its samples: token ids, and which of them the target generated.

Where an answer carries the engine's own `prompt_token_ids` and `token_ids`, these are the sample, verbatim. Where it
does not, the conversation is rendered, and an answer is supervised when its rendered prompt is what the target saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.chat.chat import Chat, open_chat
from draftmill.chat.turns import Borders, RenderedTurns, encode_turns, find_borders, render_turns
from draftmill.contracts.rows import Message, Row, RowError
from draftmill.settings.tokenize import Turns


class Sample(NamedTuple):
    """One row of the tokenized set."""

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    truncated: bool

    @property
    def has_anchor(self) -> bool:
        """Whether two supervised tokens follow each other: the drafter can learn from it (contracts/blocks.py)."""
        return bool((self.loss_mask[1:] & self.loss_mask[:-1]).any())


@dataclass(frozen=True)
class SampleMaker:
    """Makes samples for one target under one policy."""

    chat: Chat
    borders: Borders
    num_ids: int
    """Ids from here on are not this tokenizer's."""
    turns: Turns
    max_tokens: int

    def __call__(self, row: Row) -> list[Sample]:
        """The row's samples, each with an anchor position; RowError with the reason where there is none."""
        answers = [message for message in row.messages if message["role"] == "assistant"]
        if not answers:
            raise RowError("no assistant turn")
        has_engine_ids = any("token_ids" in message for message in answers)
        pieces = self._from_engine(answers) if has_engine_ids else [self._rendered(row, len(answers))]
        samples = [self._sample(row.id, piece, is_only=len(pieces) == 1) for piece in pieces]
        kept = [sample for sample in samples if sample.has_anchor]
        if not kept:
            raise RowError(_why_nothing(pieces))
        return kept

    def _from_engine(self, answers: Sequence[Message]) -> list["_Ids"]:
        """A turn whose prompt begins with the ids of the turn before is joined to it; another starts a sample."""
        joined: list[_Ids] = []
        for number, message in enumerate(answers):
            if "token_ids" not in message:  # history that came with the prompt
                continue
            turn = _engine_turn(number, message, self.num_ids)
            if joined and self.turns == "faithful" and turn.continues(joined[-1]):
                turn = turn.joined_to(joined.pop())
            joined.append(turn)
        return joined if self.turns == "faithful" else joined[-1:]

    def _rendered(self, row: Row, num_answers: int) -> "_Ids":
        """Up to the last answer: what follows it teaches nothing, and makes some templates drop its reasoning."""
        last = max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
        turns = render_turns(
            self.chat, self.borders, row.messages[: last + 1], tools=row.tools, **_template_kwargs(row)
        )
        if row.finish_reason == "length":
            turns = _without_end(turns, self.borders, num_answers - 1)
        if self.turns == "last" or row.only_last:
            keep = [i for i, answer in enumerate(turns.answers) if answer == num_answers - 1]
            turns = RenderedTurns(turns.text, (num_answers - 1,) * len(keep), tuple(turns.spans[i] for i in keep))
        return _Ids(num_answers - 1, *encode_turns(self.chat, turns))

    def _sample(self, row_id: str, piece: "_Ids", *, is_only: bool) -> Sample:
        return _cut(row_id if is_only else f"{row_id}#{piece.answer}", piece, self.max_tokens)


def _cut(sample_id: str, piece: "_Ids", max_tokens: int) -> Sample:
    ids, mask = np.asarray(piece.ids[:max_tokens], np.int32), np.asarray(piece.mask[:max_tokens], np.bool_)
    return Sample(sample_id, ids, mask, len(piece.ids) > max_tokens)


def open_sample_maker(folder: Path, turns: Turns, max_tokens: int) -> SampleMaker:
    """A maker for the target in `folder`; InputError where its template's borders cannot be found."""
    chat = open_chat(folder)
    num_ids = max(chat.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return SampleMaker(chat, find_borders(chat), num_ids, turns, max_tokens)


class _Ids(NamedTuple):
    """Ids and mask that end with the row's answer number `answer` (from 0)."""

    answer: int
    ids: list[int]
    mask: list[bool]

    def continues(self, earlier: "_Ids") -> bool:
        prompt = self.ids[: self.mask.index(True)] if True in self.mask else self.ids
        return prompt[: len(earlier.ids)] == earlier.ids

    def joined_to(self, earlier: "_Ids") -> "_Ids":
        return _Ids(self.answer, self.ids, earlier.mask + self.mask[len(earlier.mask) :])


def _engine_turn(number: int, message: Message, num_ids: int) -> _Ids:
    prompt, answer = message.get("prompt_token_ids"), message["token_ids"]
    for ids in (prompt, answer):
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RowError("token_ids and prompt_token_ids are not two lists of numbers")
    assert isinstance(prompt, list)
    if any(not 0 <= i < num_ids for i in (*prompt, *answer)):
        raise RowError("a token id that this tokenizer does not have", "was the row made by another target?")
    return _Ids(number, prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _template_kwargs(row: Row) -> dict[str, Any]:
    """What the prompt was rendered with when the row was generated, e.g. `enable_thinking`."""
    given = (row.sampling or {}).get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise RowError("chat_template_kwargs is not an object", repr(given)[:80])
    return given


def _without_end(turns: RenderedTurns, borders: Borders, answer: int) -> RenderedTurns:
    """An answer cut by its token limit has no end-of-turn token: the template printed one that nobody generated."""
    if not turns.answers or turns.answers[-1] != answer:
        return turns
    start, stop = turns.spans[-1]
    stop -= len(borders.end)
    return RenderedTurns(turns.text[:stop], turns.answers, (*turns.spans[:-1], (start, stop)))


def _why_nothing(pieces: Sequence[_Ids]) -> str:
    whole = [_cut("", piece, len(piece.ids)) for piece in pieces]
    if any(sample.has_anchor for sample in whole):
        return "nothing to learn from within max_tokens"
    if any(sample.loss_mask.any() for sample in whole):
        return "an answer of a single token"
    return "no answer behind the prompt the target saw"
