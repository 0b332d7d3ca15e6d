"""One row on its way: the target answers turn after turn, on its own earlier answers; all of them or none."""

from typing import Any

from draftmill.chat.chat import Chat
from draftmill.contracts.cards import Dropped
from draftmill.contracts.rows import Message, Row, RowError
from draftmill.generate.prompts import Prompt
from draftmill.serving.protocol import Choice

THINK, END_THINK = "<think>", "</think>"

TOO_LONG = "prompt too long for the target's window"
CUT = "cut at max_new_tokens"
EMPTY = "empty answer"
OPEN_THINKING = "thinking never ended"


class Conversation:
    """`prompt_ids` is what the target reads next; None once the row is whole or dropped."""

    def __init__(self, prompt: Prompt, chat: Chat, max_prompt_tokens: int) -> None:
        self.prompt = prompt
        self.prompt_ids: list[int] | None = None
        self.dropped: Dropped | None = None
        self._chat = chat
        self._max_prompt_tokens = max_prompt_tokens
        self._messages: list[Message] = []
        self._num_answered = 0
        self._is_thinking = False
        self._finish_reason: str | None = None
        self._render_next()

    def take(self, choice: Choice, *, keeps_cut: bool) -> None:
        """Adds the target's answer to the current turn, and renders the next one if there is one."""
        assert self.prompt_ids is not None, "an answer belongs to a prompt"
        is_last = self._num_answered + 1 == len(self.prompt.turns)
        try:
            # A later turn on a cut answer would be a conversation that never takes place.
            if choice.finish_reason == "length" and not (keeps_cut and is_last):
                raise RowError(CUT)
            message = answer_message(self._chat, self.prompt_ids, choice, is_thinking=self._is_thinking)
        except RowError as error:
            self._drop(error.reason)
            return
        self._messages.append(message)
        self._num_answered += 1
        self._finish_reason = choice.finish_reason
        self._render_next()

    def row(self, sampling: dict[str, Any]) -> Row:
        """The whole row, answered."""
        assert self.dropped is None and self.prompt_ids is None, "a row is given when it is whole"
        return Row(
            id=self.prompt.row.id,
            messages=tuple(self._messages),
            family=self.prompt.row.family,
            tools=self.prompt.row.tools,
            finish_reason=self._finish_reason,
            sampling=sampling,
        )

    def _render_next(self) -> None:
        self.prompt_ids = None
        if self._num_answered == len(self.prompt.turns):
            return
        self._messages.extend(self.prompt.turns[self._num_answered])
        try:
            text = self._chat.render(self._messages, add_generation_prompt=True, tools=self.prompt.row.tools)
            ids = self._chat.encode(text)
        except RowError as error:
            self._drop(error.reason)
            return
        if len(ids) > self._max_prompt_tokens:
            self._drop(TOO_LONG)
            return
        self.prompt_ids = ids
        self._is_thinking = text.rstrip().endswith(THINK)

    def _drop(self, reason: str) -> None:
        self.prompt_ids = None
        self.dropped = self.prompt.dropped(reason)


def answer_message(chat: Chat, prompt_ids: list[int], choice: Choice, *, is_thinking: bool) -> Message:
    """The assistant message of one answer, its reasoning split off; RowError where there is no answer in it.

    Text is decoded from the ids, special tokens inside the answer included: that is what the target wrote.
    """
    is_stopped = choice.finish_reason == "stop"
    text = chat.decode(choice.token_ids[:-1] if is_stopped else choice.token_ids)
    reasoning, content = split_reasoning(text, is_thinking=is_thinking)
    if is_stopped and reasoning is not None and END_THINK not in text:
        raise RowError(OPEN_THINKING)
    if not content.strip() and (is_stopped or not reasoning):
        raise RowError(EMPTY)
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message | {"prompt_token_ids": prompt_ids, "token_ids": choice.token_ids}


def split_reasoning(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """Reasoning (None where there is none) and content. `is_thinking`: the prompt ends inside an open think block."""
    before, end, after = text.partition(END_THINK)
    if end:
        return before.removeprefix("\n").removeprefix(THINK).strip("\n"), after.lstrip("\n")
    if is_thinking or text.lstrip().startswith(THINK):
        return text.lstrip().removeprefix(THINK).strip("\n"), ""
    return None, text
