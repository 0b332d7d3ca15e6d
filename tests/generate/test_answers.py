"""An answer is kept, or kept out with its reason: cut, empty, locked, unfinished, in the wrong mode, no text."""

from typing import Any

import pytest

from draftmill.chat.chat import Chat, open_chat
from draftmill.generate.answers import (
    BROKEN_TAGS,
    CUT,
    EMPTY,
    LOCKED,
    NO_TEXT,
    NO_THINKING,
    OPEN_CALL,
    OPEN_THINKING,
    THINKING,
    Answer,
    ends_in_cycle,
    fault_of,
    sort_out,
)
from draftmill.settings.generate import AnswerLimits
from tiny import END_THINK_ID, IM_END_ID, write_tiny_tokenizer

LIMITS = AnswerLimits()
KEEPING = AnswerLimits(on_length="keep")
OPEN_PROMPT = list(b"say:<think>\n")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(write_tiny_tokenizer(tmp_path_factory.mktemp("target")))


def said(content: str, reasoning: str | None = None, finish: str = "stop", **more: Any) -> Answer:
    given = {"tool_calls": None, "prompt_ids": None, "token_ids": None, "num_prompt_tokens": 1, "num_tokens": 9}
    return Answer(content=content, reasoning=reasoning, finish_reason=finish, is_open=False, **{**given, **more})


def with_ids(text: str, content: str, reasoning: str | None = None, finish: str = "stop") -> Answer:
    """What the target wrote, and what the engine made of it."""
    ids = [END_THINK_ID if part == "</think>" else part for part in _cut(text)]
    flat = [i for part in ids for i in ([part] if isinstance(part, int) else part.encode())]
    token_ids = flat if finish == "length" else [*flat, IM_END_ID]
    return said(content, reasoning, finish, prompt_ids=OPEN_PROMPT, token_ids=token_ids, num_tokens=len(token_ids))


def _cut(text: str) -> list[Any]:
    before, tag, after = text.partition("</think>")
    return [before, tag, after] if tag else [before]


def judged(chat: Chat, answer: Answer, thinks: bool | None, limits: AnswerLimits = LIMITS) -> tuple[str | None, Answer]:
    sorted_out = sort_out(answer, chat, thinks=thinks)
    return fault_of(sorted_out, limits, thinks=thinks, is_last=True), sorted_out


@pytest.mark.parametrize(
    ("answer", "thinks", "reasoning", "content"),
    [
        (said("42", "why"), True, "why", "42"),
        (said("why\n</think>\n\n42"), True, "why", "42"),  # no parser, the opener stood in the prompt
        (said("<think>\nwhy\n</think>\n\n42"), True, "why", "42"),
        (said("<think>\nwhy\n</think>\n\n42"), None, "why", "42"),
        (said("\n</think>\n\n42"), True, "", "42"),
        (said("42", ""), True, "", "42"),
        (said("42"), False, None, "42"),
        (said("42"), None, None, "42"),
        (said("42", "why"), None, "why", "42"),
        # The parser lost the reasoning; the ids have it.
        (with_ids("why\n</think>\n\n42", "42"), True, "why", "42"),
    ],
)
def test_reasoning_is_found_wherever_the_engine_left_it(
    chat: Chat, answer: Answer, thinks: bool | None, reasoning: str | None, content: str
) -> None:
    fault, sorted_out = judged(chat, answer, thinks)
    assert (fault, sorted_out.reasoning, sorted_out.content) == (None, reasoning, content)


@pytest.mark.parametrize(
    ("answer", "thinks", "fault"),
    [
        (said("42"), True, NO_THINKING),
        (with_ids("a monologue", "a monologue"), True, OPEN_THINKING),  # its end came before the closing tag
        (said("a monologue", finish="length"), True, CUT),
        (with_ids("a monologue", "a monologue", finish="length"), True, CUT),
        (said("", "a monologue", finish="length"), True, CUT),
        (said("", "why"), True, EMPTY),
        (with_ids("why\n</think>\n\n", "", "why"), True, EMPTY),
        (with_ids("why", "", "why"), True, OPEN_THINKING),
        (said("", None), True, EMPTY),
        (said(" \n"), False, EMPTY),
        (said("42", "why"), False, THINKING),
        (said("", "42"), False, THINKING),  # sgl-project/sglang#20786
        (said("<think>\nwhy\n</think>\n\n42"), False, THINKING),
        (said("4 </think> 2"), False, BROKEN_TAGS),
        (said("4 </think> 2"), None, BROKEN_TAGS),
        (said("why</think>4 <think> 2"), True, BROKEN_TAGS),
        (said("why</think>4 </think> 2"), True, BROKEN_TAGS),
        (said("42 </think>", "why"), True, BROKEN_TAGS),
        (said("half \ud83d"), False, NO_TEXT),
        (said("42", "half \ud83d"), True, NO_TEXT),
        (said("", tool_calls=[{"function": {"name": "f", "arguments": {"x": ["\udc00"]}}}]), False, NO_TEXT),
        (said("text", finish="content_filter"), False, "ended by the engine (content_filter)"),
        (said("red blue " * 60), False, LOCKED),
        (said("", "red blue " * 60), True, LOCKED),
    ],
)
def test_what_cannot_be_used_is_kept_out_with_its_reason(
    chat: Chat, answer: Answer, thinks: bool | None, fault: str
) -> None:
    assert judged(chat, answer, thinks)[0] == fault


def test_unfinished_thinking_is_never_taken_for_an_answer(chat: Chat) -> None:
    for answer in (said("a monologue", finish="length"), said("", "a monologue", finish="length")):
        fault, sorted_out = judged(chat, answer, True, KEEPING)
        assert (fault, sorted_out.content) == (CUT, "")
    # With its ids a beginning can be learnt from; it is reasoning all the same.
    fault, kept = judged(chat, with_ids("a monologue", "a monologue", finish="length"), True, KEEPING)
    assert (fault, kept.reasoning, kept.content, kept.is_cut) == (None, "a monologue", "", True)


def test_a_cut_answer_is_kept_where_that_is_asked_for_and_no_turn_follows(chat: Chat) -> None:
    answer = said("a beginning", finish="length")
    assert fault_of(answer, LIMITS, thinks=None, is_last=True) == CUT
    assert fault_of(answer, KEEPING, thinks=None, is_last=True) is None
    assert fault_of(answer, KEEPING, thinks=None, is_last=False) == CUT


def test_a_tool_call_is_an_answer_unless_a_turn_follows_that_ignores_it(chat: Chat) -> None:
    call = said("", finish="tool_calls", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    assert fault_of(call, LIMITS, thinks=None, is_last=True) is None
    assert fault_of(call, LIMITS, thinks=None, is_last=False) == OPEN_CALL


def naive_cycle(ids: list[int], limits: AnswerLimits) -> bool:
    """The longest run of each period, counted from the end."""
    for period in range(1, limits.cycle_tokens + 1):
        run = period
        while run < len(ids) and ids[-1 - run] == ids[-1 - run + period]:
            run += 1
        enough = max(period * limits.cycle_times, limits.cycle_run_tokens, round(limits.cycle_run_frac * len(ids)))
        if enough <= run <= len(ids):
            return True
    return False


@pytest.mark.parametrize("period", [1, 2, 7, 31, 32, 33])
def test_a_short_cycle_to_the_very_end_is_told_from_a_long_or_a_finished_one(period: int) -> None:
    cycle = list(range(period))
    for head, times, tail in ((0, 40, 0), (90, 8, 0), (90, 7, 0), (5000, 9, 0), (10, 70, 1), (10, 70, period + 1)):
        ids = [*range(1000, 1000 + head), *(cycle * times), *range(5000, 5000 + tail)]
        assert ends_in_cycle(ids, LIMITS, 1) == naive_cycle(ids, LIMITS), (head, times, tail)
    assert ends_in_cycle(cycle * 70, LIMITS, 1) == (period <= 32)
    assert not ends_in_cycle([*(cycle * 70), 99], LIMITS, 1)
    assert not ends_in_cycle([], LIMITS, 1)


def test_a_cycle_of_text_counts_by_characters() -> None:
    rows = "".join(f"<option value={year}>{year}</option>\n" for year in range(1950, 2020))
    assert not ends_in_cycle(rows, LIMITS, 4)
    assert ends_in_cycle("The list goes on.\n" * 30, LIMITS, 4)
    assert not ends_in_cycle("ha" * 20, LIMITS, 4)
