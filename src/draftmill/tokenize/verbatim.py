"""Answers that carry their engine's own token ids: these are the sample, verbatim, and no template is asked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.rows import Message, RowError
from draftmill.tokenize.encoders import Encoded


class EngineTurn(NamedTuple):
    """Ids and mask up to the row's answer number `answer` (from 0)."""

    answer: int
    prompt_tokens: int
    """How many ids the target was given before it wrote this answer."""
    encoded: Encoded

    def continues(self, earlier: "EngineTurn") -> bool:
        """Whether the target was given all of the earlier turn, token for token."""
        ids, before = self.encoded.input_ids[: self.prompt_tokens], earlier.encoded.input_ids
        return len(ids) >= len(before) and np.array_equal(ids[: len(before)], before)

    def joined_to(self, earlier: "EngineTurn") -> "EngineTurn":
        """One sample of both, each answer supervised."""
        before = earlier.encoded.loss_mask
        mask = np.concatenate([before, self.encoded.loss_mask[len(before) :]])
        return self._replace(encoded=Encoded(self.encoded.input_ids, mask))


def engine_turns(answers: Sequence[Message], num_ids: int) -> list[EngineTurn]:
    """One turn for each answer that carries ids (the others came with the prompt); RowError where they are none.

    `num_ids` is how many ids the tokenizer has.
    """
    return [_turn(number, answer, num_ids) for number, answer in enumerate(answers) if "token_ids" in answer]


def joined(turns: Sequence[EngineTurn]) -> list[EngineTurn]:
    """Turns, each joined to the one before where that is the beginning of its prompt; another starts anew."""
    made: list[EngineTurn] = []
    for turn in turns:
        made.append(turn.joined_to(made.pop()) if made and turn.continues(made[-1]) else turn)
    return made


def _turn(number: int, message: Message, num_ids: int) -> EngineTurn:
    prompt, answer = _ids(message.get("prompt_token_ids"), num_ids), _ids(message["token_ids"], num_ids)
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return EngineTurn(number, len(prompt), Encoded(np.concatenate([prompt, answer]), mask))


def _ids(given: Any, num_ids: int) -> NDArray[np.int32]:
    if not isinstance(given, list) or not set(map(type, given)) <= {int}:
        raise RowError("token_ids and prompt_token_ids are not two lists of numbers")
    if given and not 0 <= min(given) <= max(given) < num_ids:
        raise RowError("a token id that this tokenizer does not have", "was the row made by another target?")
    return np.array(given, np.int32)
