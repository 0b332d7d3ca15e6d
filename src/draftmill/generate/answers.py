"""One answer of the target: what it says, and why it is kept out of the set where it is.

An engine may have taken the reasoning out of the text, or not, or lost it (vllm-project/vllm#27755, #35221, #50624,
#52640; sgl-project/sglang#20786, #33154). What is believed: a reasoning field, a closing tag in the text, and the token
ids, never a guess. Unfinished thinking is not an answer, whatever field it came in.
"""

from dataclasses import dataclass, replace
from typing import Any

from draftmill.chat.chat import Chat
from draftmill.contracts.rows import Message
from draftmill.settings.generate import AnswerLimits

THINK, END_THINK = "<think>", "</think>"

CUT = "cut at max_new_tokens"
EMPTY = "empty answer"
OPEN_THINKING = "thinking never ended"
LOCKED = "ends in a short cycle"
NO_THINKING = "wrong mode: no thinking where it is wanted"
THINKING = "wrong mode: thinking where none is wanted"
BROKEN_TAGS = "broken think tags"
NO_TEXT = "not valid Unicode text"
OPEN_CALL = "a tool call in the middle that nothing answers"
ENDED = "ended by the engine"
FOREIGN_ID = "a token id that this tokenizer does not have"

# Where no ids are given, cycles are looked for in the text: so many characters stand for a token.
_CHARS_PER_TOKEN = 4
_TOOL_FINISHES = ("tool_calls", "function_call")
# Enough of a prompt to see how it ends.
_TAIL_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """What the target said to one turn. `prompt_ids` and `token_ids` are the engine's own, where it gives them."""

    content: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]] | None
    finish_reason: str
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    num_prompt_tokens: int
    num_tokens: int
    is_open: bool = False
    """The token limit, or the end, came inside the thinking."""

    @property
    def is_cut(self) -> bool:
        """Whether the token limit ended it."""
        return self.finish_reason == "length"

    @property
    def is_blank(self) -> bool:
        """Whether there is no answer in it, thinking apart."""
        return not self.content.strip() and not self.tool_calls

    @property
    def written_ids(self) -> list[int] | None:
        """The token ids without the one that ended the turn."""
        return self.token_ids if self.token_ids is None or self.is_cut else self.token_ids[:-1]

    def message(self) -> Message:
        """The assistant message of a row."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.token_ids is not None:
            message |= {"prompt_token_ids": self.prompt_ids, "token_ids": self.token_ids}
        return message


def sort_out(answer: Answer, chat: Chat, *, thinks: bool | None) -> Answer:
    """The answer with its reasoning taken out of its text, where the engine left or lost it there.

    `thinks`: whether thinking is wanted (None: the target may choose).
    """
    if answer.reasoning is not None:
        # The line ends around the tags are the template's, whoever takes the tags out.
        reasoning, content = answer.reasoning.strip("\n"), answer.content.lstrip("\n")
        is_open = answer.is_blank and _ends_open(answer, chat)
        return replace(answer, reasoning=reasoning, content=content, is_open=is_open)
    before, tag, after = answer.content.partition(END_THINK)
    begins = answer.content.lstrip().startswith(THINK)
    if tag and (thinks or begins):
        return replace(answer, reasoning=_thoughts(before), content=after.lstrip("\n"))
    if not tag and (begins or (thinks and _ends_open(answer, chat))):
        return replace(answer, reasoning=_thoughts(answer.content), content="", is_open=True)
    if thinks and answer.token_ids is not None:
        # The ids hold the closing tag that the text has lost: the ids are what the target wrote.
        before, tag, after = chat.decode(answer.written_ids or []).partition(END_THINK)
        if tag:
            return replace(answer, reasoning=_thoughts(before), content=after.lstrip("\n"))
    return answer


def _thoughts(text: str) -> str:
    return text.lstrip().removeprefix(THINK).strip("\n")


def _ends_open(answer: Answer, chat: Chat) -> bool:
    """Whether the answer ends inside its thinking, as its ids tell; without ids a cut one is taken to."""
    if answer.token_ids is None or chat.tokenizer.token_to_id(END_THINK) in answer.token_ids:
        return answer.token_ids is None and answer.is_cut
    return answer.is_cut or opens_thinking(chat.decode((answer.prompt_ids or [])[-_TAIL_TOKENS:]))


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a think block: what the target writes next are thoughts."""
    return prompt.rstrip().endswith(THINK)


def fault_of(answer: Answer, limits: AnswerLimits, *, thinks: bool | None, is_last: bool) -> str | None:
    """Why the answer is kept out of the set; None where nothing is wrong. `is_last`: no turn follows it."""
    if not _is_text(answer):
        return NO_TEXT
    if fault := _mode_fault(answer, thinks):
        return fault
    if limits.on_repetition == "aside" and is_locked(answer, limits):
        return LOCKED
    if answer.is_cut:
        # A later turn on a cut answer would be a conversation that never takes place. Without ids, unfinished
        # thinking would be printed by the template with an end that nobody wrote.
        is_whole = answer.token_ids is not None or not answer.is_blank
        return None if limits.on_length == "keep" and is_last and is_whole and answer.num_tokens else CUT
    if answer.is_blank:
        return OPEN_THINKING if answer.is_open else EMPTY
    if answer.finish_reason not in ("stop", *_TOOL_FINISHES):
        return f"{ENDED} ({answer.finish_reason})"
    return OPEN_CALL if answer.tool_calls and not is_last else None


def _mode_fault(answer: Answer, thinks: bool | None) -> str | None:
    has_thoughts = bool((answer.reasoning or "").strip())
    if thinks is False and has_thoughts:
        return THINKING
    if THINK in answer.content or END_THINK in answer.content or THINK in (answer.reasoning or ""):
        return BROKEN_TAGS
    if thinks and answer.reasoning is None and not answer.is_cut and not answer.is_blank:
        return NO_THINKING
    return None


def _is_text(answer: Answer) -> bool:
    """Whether all of it can be written as UTF-8: half an emoji cannot."""
    try:
        for text in (answer.content, answer.reasoning or "", *_texts(answer.tool_calls)):
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def is_locked(answer: Answer, limits: AnswerLimits) -> bool:
    """Whether the answer ends in a short cycle that came around again and again."""
    if answer.token_ids is not None:
        return ends_in_cycle(answer.written_ids or [], limits, 1)
    return ends_in_cycle(answer.content or answer.reasoning or "", limits, _CHARS_PER_TOKEN)


def ends_in_cycle(written: list[int] | str, limits: AnswerLimits, scale: int) -> bool:
    """Whether `written` ends in a cycle of at most `cycle_tokens`, `scale` elements counting for a token.

    A run of period `p` is a tail that equals itself moved by `p`.
    """
    shortest = max(limits.cycle_run_tokens * scale, round(limits.cycle_run_frac * len(written)))
    for period in range(1, min(limits.cycle_tokens * scale, len(written) // limits.cycle_times) + 1):
        run = max(shortest, period * limits.cycle_times)
        if run > len(written):
            continue
        if written[-1] == written[-1 - period] and written[-run:-period] == written[len(written) - run + period :]:
            return True
    return False
