"""One row of conversation -> its samples, first without their ids, then cut to length and sorted out.

Where an answer carries the engine's own `prompt_token_ids` and `token_ids`, these are the sample, verbatim. Where it
does not, the conversation is rendered, and the policy says which answers are supervised (chat/turns.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.chat.conversation import Conversation
from draftmill.chat.skeletons import Skeletons
from draftmill.chat.turns import RenderedTurns, TurnFinder
from draftmill.contracts.rows import Message, Row, RowError
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.encoders import Encoded
from draftmill.tokenize.verbatim import engine_turns, joined

_TWO_SUPERVISED = np.ones(2, np.bool_).tobytes()
_NUMBERED = re.compile(r"#[0-9]+\Z")


class Unencoded(NamedTuple):
    """A sample to be: text, or ids that an engine wrote down."""

    id: str
    """`row`, or `row#turn` where the row makes several samples or is itself called so; turn is the number (from 0) of
    the sample's last answer."""
    content: RenderedTurns | Encoded


class Unfolded(NamedTuple):
    """What a row makes before anything is encoded."""

    samples: list[Unencoded]
    answers: int
    """Of the target's own."""
    unsupervised: int
    """Those of them that no sample supervises, wherever samples are cut later."""


class Sample(NamedTuple):
    """One row of the tokenized set."""

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    truncated: bool

    @property
    def has_anchor(self) -> bool:
        """Whether two supervised tokens follow each other: a drafter can learn from it (contracts/blocks.py)."""
        return _TWO_SUPERVISED in self.loss_mask.tobytes()


@dataclass(frozen=True)
class Unfolder:
    """Says which samples a row makes, for one target under one policy."""

    render: Skeletons | TurnFinder
    turns: Turns
    template_kwargs: Mapping[str, Any]
    """What the prompts of rows were rendered with that do not say so themselves."""

    def __call__(self, row: Row) -> Unfolded:
        """The row's samples to be; RowError with the reason where it cannot make any."""
        answers = [message for message in row.messages if message["role"] == "assistant"]
        turns: Turns = "last" if row.only_last else self.turns
        if any("token_ids" in message for message in answers):
            return self._verbatim(row, answers, turns)
        renders = self.render(self.conversation(row), turns)
        supervised = {answer for render in renders for answer in render.answers}
        own = 1 if row.only_last else len(answers)
        made = [(max(render.answers, default=0), render) for render in renders]
        return Unfolded(_named(row.id, made), own, own - len(supervised))

    def _verbatim(self, row: Row, answers: Sequence[Message], turns: Turns) -> Unfolded:
        given = engine_turns(answers, self.render.chat.num_ids)
        made = given[-1:] if turns == "last" else joined(given)
        own = 1 if row.only_last else len(given)
        samples = _named(row.id, [(turn.answer, turn.encoded) for turn in made])
        return Unfolded(samples, own, own - 1 if turns == "last" else 0)

    def conversation(self, row: Row) -> Conversation:
        """The row as its template is asked to print it."""
        given = (row.sampling or {}).get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise RowError("chat_template_kwargs is not an object", repr(given)[:80])
        is_cut = row.finish_reason == "length"
        return Conversation(row.messages, row.tools, {**self.template_kwargs, **given}, is_cut)


def _named(row_id: str, made: Sequence[tuple[int, RenderedTurns | Encoded]]) -> list[Unencoded]:
    """With ids that no other row's samples have: a row that is called `a#0` itself must not meet the first of `a`."""
    if len(made) == 1 and not _NUMBERED.search(row_id):
        return [Unencoded(row_id, made[0][1])]
    return [Unencoded(f"{row_id}#{answer}", content) for answer, content in made]


def holds_reasoning(row: Row) -> bool:
    """Whether an answer of the row holds reasoning, in a field of its own or before a closing tag."""
    return any(
        (message.get("reasoning_content") or "").strip() or "</think>" in (message["content"] or "")
        for message in row.messages
        if message["role"] == "assistant"
    )


def cut(sample_id: str, encoded: Encoded, max_tokens: int) -> Sample:
    """The sample, no longer than `max_tokens`: cut in its ids, and flagged, without an end that nobody generated."""
    is_long = len(encoded.input_ids) > max_tokens
    return Sample(sample_id, encoded.input_ids[:max_tokens], encoded.loss_mask[:max_tokens], is_long)


def why_nothing(row_samples: Sequence[Encoded]) -> str:
    """The reason why none of a row's samples, in full length, can be kept."""
    whole = [cut("", encoded, len(encoded.input_ids)) for encoded in row_samples]
    if any(sample.has_anchor for sample in whole):
        return "nothing to learn from within max_tokens"
    if any(sample.loss_mask.any() for sample in whole):
        return "an answer of a single token"
    return "no answer behind the prompt the target saw"
