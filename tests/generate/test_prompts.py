"""A row becomes what the target is asked, its own turns or each recorded one anew, or is left out with a reason."""

import json
from typing import Any

import pytest

from draftmill.contracts.cards import Dropped
from draftmill.contracts.rows import RowError
from draftmill.generate.prompts import Prompt, Reading, cut_turns

OWN, REPLAY = Reading("own", imports=False), Reading("replay", imports=False)
TRACE = ("system", "user", "assistant", "tool", "assistant", "user", "assistant")


def says(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]


def read(reading: Reading, *messages: dict[str, Any], **more: Any) -> list[Prompt | Dropped]:
    return reading.prompts("p.jsonl", 7, json.dumps({"id": "r", "messages": messages, **more}).encode())


def test_answers_are_left_out_and_mark_the_turns() -> None:
    turns = cut_turns(says("system", "user", "assistant", "user", "assistant"))
    assert [[m["content"] for m in turn] for turn in turns] == [["system 0", "user 1"], ["user 3"]]
    assert cut_turns(says("assistant", "user", "user"))[0] == tuple(says("assistant", "user", "user")[1:])


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (("system",), "no user message"),
        (("assistant",), "no user message"),
        (("user", "assistant", "system"), "no user message"),
        (("user", "assistant", "tool", "user"), "--turns replay keeps it"),
    ],
)
def test_a_row_without_something_to_answer_is_refused(roles: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        cut_turns(says(*roles))


def test_a_row_that_cannot_be_read_says_what_is_special_about_it() -> None:
    (unread,) = OWN.prompts("p.jsonl", 7, b'{"id": "r", "prompt": [{"role": "user", "content": "a"}]}')
    detail = "it is a list; a list of messages is read from messages"
    assert unread == Dropped(file="p.jsonl", line=7, id="r", reason="prompt is not text", detail=detail)


def test_replay_asks_for_each_recorded_answer_from_the_recorded_history() -> None:
    messages = says(*TRACE)
    messages[2] |= {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "reasoning_content": "why"}
    messages[4] |= {"token_ids": [1], "prompt_token_ids": [2]}
    prompts = read(REPLAY, *messages, tools=[{"name": "f"}])
    assert all(isinstance(prompt, Prompt) and len(prompt.turns) == 1 for prompt in prompts)
    asked = {prompt.id: prompt.turns[0] for prompt in prompts if isinstance(prompt, Prompt)}
    assert {row_id: len(turn) for row_id, turn in asked.items()} == {"r#0": 2, "r#1": 4, "r#2": 6}
    assert asked["r#1"][2]["tool_calls"] and asked["r#1"][2]["reasoning_content"] == "why"
    assert asked["r#1"][3] == {"role": "tool", "content": "tool 3"}
    # Ids in the history belong to a row of their own: trained on here as well, they would count twice.
    assert not any("token_ids" in message for message in asked["r#2"])


def test_replay_counts_every_answer_and_says_which_cannot_be_asked_for() -> None:
    greeting = read(REPLAY, *says("assistant", "user", "assistant", "assistant", "user"))
    assert [(p.id, isinstance(p, Prompt)) for p in greeting] == [("r#1", True), ("r#2", False), ("r#3", True)]
    (nothing,) = read(REPLAY, *says("system", "assistant"))
    assert isinstance(nothing, Dropped) and nothing.reason == "no user message to answer"
    (open_end,) = read(REPLAY, *says("user"))
    assert open_end.id == "r#0"


def test_a_row_is_left_out_with_its_place_and_reason() -> None:
    for line, reason in (
        (b"{", "broken JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"prompt": " "}', "an empty user message"),
    ):
        (left,) = OWN.prompts("p.jsonl", 3, line)
        assert isinstance(left, Dropped) and (left.file, left.line, left.reason) == ("p.jsonl", 3, reason)


def test_an_answer_with_ids_is_taken_as_it_is_only_where_that_is_asked_for() -> None:
    answered = [*says("user"), {"role": "assistant", "content": "a", "token_ids": [1], "prompt_token_ids": [2]}]
    (anew,) = read(OWN, *answered)
    assert isinstance(anew, Prompt) and not anew.is_answered and len(anew.turns) == 1
    (taken,) = read(Reading("own", imports=True), *answered)
    assert isinstance(taken, Prompt) and taken.is_answered
    (unanswered,) = read(Reading("own", imports=True), *answered, *says("user"))
    assert isinstance(unanswered, Prompt) and len(unanswered.turns) == 2


def test_replayed_and_imported_rows_never_share_an_id() -> None:
    answered = [*says("user"), {"role": "assistant", "content": "a", "token_ids": [1], "prompt_token_ids": [2]}]
    both = Reading("replay", imports=True)
    (replayed,) = read(both, *says("user", "assistant"), id="a")
    (taken,) = read(both, *answered, id="a#0")
    assert isinstance(taken, Prompt) and taken.is_answered and (replayed.id, taken.id) == ("a#0", "a#0#0")


def test_rows_that_ask_the_same_have_the_same_content_whatever_was_answered_before() -> None:
    def content(reading: Reading, *messages: dict[str, Any], **more: Any) -> bytes:
        (prompt, *_) = read(reading, *messages, **more)
        assert isinstance(prompt, Prompt)
        return reading.content(prompt)

    asked, other = says("system", "user"), {"role": "assistant", "content": "something else"}
    assert content(OWN, *asked) == content(OWN, *asked, other)
    assert content(REPLAY, *asked) != content(REPLAY, *asked, other)
    assert content(OWN, *asked) != content(OWN, *asked, tools=[{"name": "f"}])
    assert content(OWN, *asked) != content(OWN, *says("user"))
