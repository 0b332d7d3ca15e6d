"""Rows that came with the target's own answer and its token ids: checked, judged like any other, never asked."""

import msgspec

from draftmill.contracts.cards import Dropped
from draftmill.contracts.rows import Message, RowError
from draftmill.generate.answers import END_THINK, FOREIGN_ID, THINK, Answer, fault_of, sort_out
from draftmill.generate.conversation import Kept
from draftmill.generate.exclusion import EXCLUDED
from draftmill.generate.figures import AnswerFigures
from draftmill.generate.manner import Manner
from draftmill.generate.prompts import Prompt

NO_PROMPT_IDS = "token_ids without prompt_token_ids"
NO_IDS = "token ids are no list of numbers"
OTHER_TEXT = "token ids that say something else than the row's text"


def taken_as_is(prompt: Prompt, manner: Manner) -> Kept | Dropped:
    """The row, kept or set aside as its answers deserve; dropped where their ids are not to be believed."""
    row = prompt.row
    if manner.exclusion and (place := manner.exclusion.find(row.messages)):
        return prompt.dropped(EXCLUDED, place)
    try:
        given = [_answer(m, manner) for m in row.messages if m["role"] == "assistant" and "token_ids" in m]
    except RowError as error:
        return prompt.dropped(error.reason, error.detail)
    said = [sort_out(answer, manner.chat, thinks=manner.thinks) for answer in given]
    # Each is judged as if it were the last: what follows it in a log did take place.
    faults = [fault_of(answer, manner.settings, thinks=manner.thinks, is_last=True) for answer in said]
    made = msgspec.structs.replace(row, id=prompt.id, finish_reason=said[-1].finish_reason)
    return Kept.of(made, next(filter(None, faults), None), AnswerFigures.of(said, 0))


def _answer(message: Message, manner: Manner) -> Answer:
    """What an assistant message says; RowError where its ids do not say the same."""
    prompt_ids, token_ids = message.get("prompt_token_ids"), message["token_ids"]
    if prompt_ids is None:
        raise RowError(NO_PROMPT_IDS)
    for ids in (prompt_ids, token_ids):
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise RowError(NO_IDS)
    chat = manner.chat
    if (foreign := manner.foreign_id(prompt_ids, token_ids)) is not None:
        raise RowError(FOREIGN_ID, f"{foreign:,} of {chat.num_ids:,}")
    is_stopped = token_ids[-1] in chat.stop_ids
    content, reasoning = message["content"] or "", message.get("reasoning_content") or ""
    written = chat.decode(token_ids[:-1] if is_stopped else token_ids)
    if not _says(written, reasoning + content, is_whole=not message.get("tool_calls")):
        raise RowError(OTHER_TEXT, f"{written[:80]!r} against {content[:80]!r}")
    return Answer(
        content=content,
        reasoning=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls"),
        finish_reason="stop" if is_stopped else "length",
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt_ids),
        num_tokens=len(token_ids),
    )


def _says(written: str, text: str, *, is_whole: bool) -> bool:
    """Whether the decoded ids are the text, white space and think tags apart; or hold it, where calls are left out."""
    squeezed = "".join(written.replace(THINK, "").replace(END_THINK, "").split())
    wanted = "".join(text.split())
    return wanted == squeezed if is_whole else wanted in squeezed
