"""A row is answered turn by turn on the target's own answers, and is whole or left out with its reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftmill.chat.chat import open_chat
from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import ServingError
from draftmill.contracts.rows import Row
from draftmill.generate.answers import CUT, EMPTY
from draftmill.generate.conversation import TOO_LONG, Conversation, Kept
from draftmill.generate.manner import Manner
from draftmill.generate.prompts import Prompt, cut_turns
from draftmill.serving.protocol import GREEDY, ChatAnswer, Choice
from draftmill.settings.generate import GenerateSettings
from tiny import END_THINK_ID, IM_END_ID, write_tiny_tokenizer

# Prints reasoning of earlier turns, and opens a think block.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m['content'] + '\n' }}"
    "{% endfor %}<think>\n"
)


def manner_of(folder: Path, *, thinks: bool | None = None, window: int = 1000, **settings: Any) -> Manner:
    given = {"input": ("p",), "output": ("o",), "target": "t", "endpoint": ("http://e/v1",), "max_new_tokens": 50}
    return Manner(open_chat(folder), GenerateSettings(**{**given, **settings}), None, window, thinks)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Manner:
    return manner_of(write_tiny_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Manner:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("think"), chat_template=THINKING_TEMPLATE)
    return manner_of(folder, thinks=True)


def in_process(manner: Manner, **settings: Any) -> Manner:
    return replace(manner, settings=manner.settings.model_copy(update={"endpoint": (), **settings}))


def start(manner: Manner, *roles: str) -> Conversation:
    messages = tuple({"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles or ("user",)))
    return Conversation(
        Prompt("r", Row(id="r", messages=messages, family="f"), cut_turns(messages), "p.jsonl", 4), manner
    )


def choice(text: str, *, is_stopped: bool = True) -> Choice:
    ids = [*text.encode(), *([IM_END_ID] if is_stopped else [])]
    return Choice(index=0, text="unused", finish_reason="stop" if is_stopped else "length", token_ids=ids)


def said(talk: Conversation, content: str | None, reasoning: str | None = None, **more: Any) -> ChatAnswer:
    """What a faithful engine says, unless told otherwise."""
    assert talk.asked is not None
    given: dict[str, Any] = {
        "tool_calls": None,
        "finish_reason": "stop",
        "prompt_token_ids": talk.asked.prompt_ids,
        "token_ids": [*(content or "").encode(errors="replace"), IM_END_ID],
        "prompt_tokens": len(talk.asked.prompt_ids),
        "completion_tokens": 5,
    }
    return ChatAnswer(content=content, reasoning=reasoning, **{**given, **more})


def row_of(talk: Conversation) -> dict[str, Any]:
    assert isinstance(talk.end, Kept) and talk.asked is None
    return json.loads(talk.end.data)


def test_later_turns_stand_on_the_targets_own_answers(plain: Manner) -> None:
    talk = start(in_process(plain), "system", "user", "assistant", "user")
    assert talk.asked is not None
    first = talk.asked.prompt_ids
    assert plain.chat.decode(first).endswith("user 1<|im_end|>\n<|im_start|>assistant\n")
    talk.take_choice(choice("mine"))
    assert talk.asked is not None
    second = talk.asked.prompt_ids
    assert second[: len(first) + 5] == [*first, *b"mine", IM_END_ID]
    assert "assistant 2" not in plain.chat.decode(second) and "system 0" in plain.chat.decode(second)
    talk.take_choice(choice("again"))
    row = row_of(talk)
    assert (row["id"], row["family"], row["finish_reason"]) == ("r", "f", "stop")
    assert row["sampling"] == GREEDY.explicit(50)
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert row["messages"][2] == {
        "role": "assistant",
        "content": "mine",
        "prompt_token_ids": first,
        "token_ids": [*b"mine", IM_END_ID],
    }


def test_what_ends_a_conversation_before_its_last_turn_keeps_it_out_whole(plain: Manner) -> None:
    for bad, reason in ((choice("begin", is_stopped=False), CUT), (choice(" \n"), EMPTY)):
        talk = start(in_process(plain, on_length="keep"), "user", "assistant", "user")
        talk.take_choice(bad)
        row = row_of(talk)
        assert isinstance(talk.end, Kept) and talk.end.reason == reason == row["reason"]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]


def test_a_cut_answer_is_kept_as_it_is_where_that_is_asked_for(plain: Manner) -> None:
    talk = start(in_process(plain, on_length="keep"))
    talk.take_choice(choice("begin", is_stopped=False))
    assert isinstance(talk.end, Kept) and talk.end.reason is None
    assert (row_of(talk)["finish_reason"], row_of(talk)["messages"][-1]["token_ids"]) == ("length", list(b"begin"))


def test_answers_get_the_room_that_the_window_leaves(plain: Manner) -> None:
    length = len((start(plain).asked or pytest.fail()).prompt_ids)

    def asked(room: int, manner: Manner = plain) -> int | Dropped | Kept | None:
        talk = start(replace(manner, window=length + room))
        return talk.asked.max_tokens if talk.asked else talk.end

    assert [asked(room) for room in (1000, 50, 49, 1)] == [50, 50, 49, 1]
    none = asked(0)
    assert isinstance(none, Dropped) and (none.reason, none.line) == (TOO_LONG, 4) and str(length) in none.detail
    # Prompts that share a batch share one limit.
    assert asked(50, in_process(plain)) == 50 and isinstance(asked(49, in_process(plain)), Dropped)
    grown = start(replace(plain, window=length + 60), "user", "assistant", "user")
    grown.take_chat(said(grown, "".join(map(chr, range(33, 127)))))
    assert isinstance(grown.end, Dropped) and grown.end.reason == TOO_LONG


def test_a_served_answer_keeps_the_engines_ids_and_reasoning(thinking: Manner) -> None:
    talk = start(thinking)
    ids = [*b"why\n", END_THINK_ID, *b"\n\n42", IM_END_ID]
    talk.take_chat(said(talk, "42", "why", token_ids=ids))
    message = row_of(talk)["messages"][-1]
    assert (message["reasoning_content"], message["content"], message["token_ids"]) == ("why", "42", ids)
    assert isinstance(talk.end, Kept)
    assert (talk.end.figures.completion_tokens, talk.end.figures.with_thinking) == (len(ids), 1)


def test_answers_without_ids_are_counted_by_the_engine_or_by_us(plain: Manner) -> None:
    counted, uncounted = start(plain), start(plain)
    counted.take_chat(said(counted, "four", token_ids=None, prompt_token_ids=None, completion_tokens=3))
    uncounted.take_chat(said(uncounted, "four", token_ids=None, prompt_token_ids=None, completion_tokens=None))
    assert isinstance(counted.end, Kept) and counted.end.figures.completion_tokens == 3
    assert isinstance(uncounted.end, Kept) and uncounted.end.figures.completion_tokens == 4
    assert "token_ids" not in row_of(counted)["messages"][-1]


def test_ids_are_kept_with_the_prompt_they_belong_to_or_not_at_all(plain: Manner) -> None:
    alone, foreign = start(plain), start(plain)
    assert alone.asked is not None
    ours = alone.asked.prompt_ids
    alone.take_chat(said(alone, "a", prompt_token_ids=None))
    assert row_of(alone)["messages"][-1]["prompt_token_ids"] == ours
    foreign.take_chat(said(foreign, "a", prompt_token_ids=None, prompt_tokens=len(ours) + 3))
    assert "token_ids" not in row_of(foreign)["messages"][-1]
    assert isinstance(foreign.end, Kept) and foreign.end.figures.prompt_differs == 1


@pytest.mark.parametrize("with_ids", [True, False])
def test_reasoning_that_an_engine_leaves_out_of_the_history_stops_the_run(thinking: Manner, with_ids: bool) -> None:
    def second_turn(read: list[int] | None = None) -> Conversation:
        talk = start(thinking, "user", "assistant", "user")
        talk.take_chat(said(talk, "42", "because"))
        assert talk.asked is not None
        theirs = talk.asked.prompt_ids if read is None else read
        answer = said(talk, "so", "hm", prompt_token_ids=theirs if with_ids else None, prompt_tokens=len(theirs))
        talk.take_chat(answer)
        return talk

    assert len(row_of(second_turn())["messages"]) == 4
    bare = thinking.render(
        [{"role": r, "content": c} for r, c in (("user", "user 0"), ("assistant", "42"), ("user", "user 2"))], None
    )
    with pytest.raises(
        ServingError, match=r"'r': an endpoint left the reasoning of earlier turns out.*reasoning_content"
    ):
        second_turn(thinking.chat.encode(bare))


def test_every_turn_is_sampled_with_a_seed_of_its_own_that_a_rerun_repeats(plain: Manner) -> None:
    def seeds(seed: int) -> list[int | None]:
        talk = start(
            replace(plain, settings=plain.settings.model_copy(update={"seed": seed})), "user", "assistant", "user"
        )
        found = []
        while talk.asked is not None:
            found.append(talk.asked.sampling.seed)
            talk.take_chat(said(talk, "a"))
        row = row_of(talk)
        assert [turn["seed"] for turn in row["sampling"]["earlier_turns"]] + [row["sampling"]["seed"]] == found
        return found

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


@pytest.mark.parametrize("ids", [[-1], [1 << 40, 5], [10**30]])
@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids"])
def test_ids_of_another_vocabulary_cost_their_row_alone(thinking: Manner, field: str, ids: list[int]) -> None:
    talk = start(thinking, "user", "assistant", "user")
    talk.take_chat(said(talk, "yes", **{field: ids}))
    assert isinstance(talk.end, Kept) and talk.end.reason == "a token id that this tokenizer does not have"
    assert row_of(talk)["messages"][-1][field] == ids


def test_half_an_emoji_costs_its_row_alone(plain: Manner) -> None:
    talk = start(plain)
    talk.take_chat(said(talk, "half \ud83d", token_ids=None))
    assert isinstance(talk.end, Kept) and talk.end.reason == "not valid Unicode text"
    assert b"\\ud83d" in talk.end.data and row_of(talk)["messages"][-1]["content"] == "half \ud83d"
