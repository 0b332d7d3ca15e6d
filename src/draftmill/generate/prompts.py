"""One input line -> what the target is asked: turn by turn on its own replies, or each recorded turn anew."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from draftmill.contracts.cards import Dropped
from draftmill.contracts.rows import Message, Row, RowError, read_row

NO_USER = "no user message to answer"
BLANK_USER = "an empty user message"
TOOL_RESULT = "a tool message answers a call that is generated anew (--turns replay keeps it)"
ANSWER_AFTER_ANSWER = "an assistant turn directly after another"

Turn = tuple[Message, ...]


@dataclass(frozen=True)
class Prompt:
    """One row to make: `turns` hold its messages up to each place where the target speaks.

    None of them: the row came with the target's own answer, and is taken as it is.
    """

    id: str
    """Of the row that is made."""
    row: Row
    turns: tuple[Turn, ...]
    file: str
    line: int

    @property
    def is_answered(self) -> bool:
        """Whether the row is taken as it is."""
        return not self.turns

    def dropped(self, reason: str, detail: str = "") -> Dropped:
        """The row, left out for `reason`."""
        return Dropped(file=self.file, line=self.line, id=self.id, reason=reason, detail=detail)


@dataclass(frozen=True)
class Reading:
    """How rows become prompts."""

    turns: Literal["own", "replay"]
    imports: bool
    """Whether an answer that carries the target's own ids is taken as it is."""

    def prompts(self, file: str, line: int, data: bytes) -> list[Prompt | Dropped]:
        """The prompts of one line, or one row left out; never empty."""
        try:
            row = read_row(data)
        except RowError as error:
            return [Dropped(file=file, line=line, id=error.row_id, reason=error.reason, detail=error.detail)]
        whole = Prompt(row.id, row, (), file, line)
        try:
            return self._cut(whole)
        except RowError as error:
            return [whole.dropped(error.reason, error.detail)]

    def _cut(self, whole: Prompt) -> list[Prompt | Dropped]:
        messages = whole.row.messages
        if self.imports and messages[-1]["role"] == "assistant" and "token_ids" in messages[-1]:
            return [whole if self.turns == "own" else _as_turn(whole)]
        if any(m["role"] == "user" and not (m["content"] or "").strip() for m in messages):
            raise RowError(BLANK_USER)
        if self.turns == "own":
            return [replace(whole, turns=cut_turns(messages))]
        return list(_replayed(whole))

    def content(self, prompt: Prompt) -> bytes:
        """What two prompts have in common where one of them is enough."""
        asked = prompt.turns if self.turns == "own" and prompt.turns else prompt.row.messages
        return msgspec.json.encode((asked, prompt.row.tools))


def cut_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The messages before each answer of the target, answers left out; RowError where the target has nothing to answer.

    system, user, assistant, user -> (system, user), (user).
    """
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            raise RowError(TOOL_RESULT)
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif _has_user(turns[-1]):
            turns.append([])
    # An answer that ends the row leaves an empty turn. A system message behind it would be lost: not in silence.
    if not _has_user(turns[-1]) and (turns.pop() or not turns):
        raise RowError(NO_USER)
    return tuple(tuple(turn) for turn in turns)


def _has_user(turn: Sequence[Message]) -> bool:
    return any(message["role"] == "user" for message in turn)


def _replayed(whole: Prompt) -> Iterator[Prompt | Dropped]:
    """A prompt for each recorded answer, its history as recorded; ids `row#turn`, counted over the row's answers."""
    history = tuple(map(_without_ids, whole.row.messages))
    answers = [place for place, message in enumerate(history) if message["role"] == "assistant"]
    if history[-1]["role"] != "assistant":
        answers.append(len(history))
    asked = [(number, place) for number, place in enumerate(answers) if _has_user(history[:place])]
    if not asked:
        raise RowError(NO_USER)
    for number, place in asked:
        prompt = replace(whole, id=f"{whole.id}#{number}", turns=(history[:place],))
        follows_answer = history[place - 1]["role"] == "assistant"
        yield prompt.dropped(ANSWER_AFTER_ANSWER) if follows_answer else prompt


def _as_turn(whole: Prompt) -> Prompt:
    """A row taken as it is, named by its last answer like the others: `a#0` given may be `a`'s first answer too."""
    number = sum(message["role"] == "assistant" for message in whole.row.messages) - 1
    return replace(whole, id=f"{whole.id}#{number}")


def _without_ids(message: Message) -> Message:
    """The message as history: it is not trained on."""
    return {key: value for key, value in message.items() if key not in ("token_ids", "prompt_token_ids")}
