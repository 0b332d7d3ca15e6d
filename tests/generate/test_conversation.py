"""A row is answered turn by turn on the target's own answers, and is whole or dropped with its reason."""

import pytest

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.rows import Row
from draftmill.generate.conversation import CUT, EMPTY, OPEN_THINKING, TOO_LONG, Conversation, split_reasoning
from draftmill.generate.prompts import Prompt, cut_turns
from draftmill.serving.protocol import Choice
from tiny import END_THINK_ID, IM_END_ID, THINK_ID, write_tiny_tokenizer

THINKING_TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}<think>\n"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(write_tiny_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def thinking_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(write_tiny_tokenizer(tmp_path_factory.mktemp("think"), chat_template=THINKING_TEMPLATE))


def start(chat: Chat, *roles: str, max_prompt_tokens: int = 500) -> Conversation:
    messages = tuple({"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles or ("user",)))
    prompt = Prompt(Row(id="r", messages=messages, family="f"), cut_turns(messages), "p.jsonl", 4)
    return Conversation(prompt, chat, max_prompt_tokens)


def answer(text: str, *, is_stopped: bool = True) -> Choice:
    ids = [*text.encode(), *([IM_END_ID] if is_stopped else [])]
    return Choice(index=0, text="unused", finish_reason="stop" if is_stopped else "length", token_ids=ids)


def thought(*ids: int | str, is_stopped: bool = True) -> Choice:
    flat = [i for part in ids for i in ([part] if isinstance(part, int) else part.encode())]
    reason = "stop" if is_stopped else "length"
    return Choice(index=0, text="", finish_reason=reason, token_ids=[*flat, IM_END_ID] if is_stopped else flat)


def test_later_turns_stand_on_the_targets_own_answers(chat: Chat) -> None:
    talk = start(chat, "system", "user", "assistant", "user")
    first = talk.prompt_ids
    assert first is not None
    assert chat.decode(first).endswith("user 1<|im_end|>\n<|im_start|>assistant\n")
    talk.take(answer("mine"), keeps_cut=False)
    second = talk.prompt_ids
    assert second is not None
    assert second[: len(first) + 5] == [*first, *b"mine", IM_END_ID]
    assert "assistant 2" not in chat.decode(second) and "system 0" in chat.decode(second)
    talk.take(answer("again"), keeps_cut=False)
    row = talk.row({"temperature": 0.0})
    assert (row.id, row.family, row.finish_reason, row.sampling) == ("r", "f", "stop", {"temperature": 0.0})
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert row.messages[2] == {
        "role": "assistant",
        "content": "mine",
        "prompt_token_ids": first,
        "token_ids": [*b"mine", IM_END_ID],
    }


def test_a_cut_answer_is_dropped_or_kept_as_asked(chat: Chat) -> None:
    dropped, kept = start(chat), start(chat)
    dropped.take(answer("begin", is_stopped=False), keeps_cut=False)
    assert dropped.dropped is not None
    assert (dropped.dropped.reason, dropped.dropped.line, dropped.dropped.id) == (CUT, 4, "r")
    kept.take(answer("begin", is_stopped=False), keeps_cut=True)
    row = kept.row({})
    assert (row.finish_reason, row.messages[-1]["token_ids"]) == ("length", list(b"begin"))


def test_no_turn_follows_a_cut_answer(chat: Chat) -> None:
    talk = start(chat, "user", "assistant", "user")
    talk.take(answer("begin", is_stopped=False), keeps_cut=True)
    assert talk.dropped is not None and talk.dropped.reason == CUT


def test_empty_answers_and_too_long_prompts_are_dropped(chat: Chat) -> None:
    empty = start(chat)
    empty.take(answer(" \n"), keeps_cut=True)
    assert empty.dropped is not None and empty.dropped.reason == EMPTY
    assert start(chat, max_prompt_tokens=10).dropped is not None
    later = start(chat, "user", "assistant", "user", max_prompt_tokens=60)
    later.take(answer("long " * 20), keeps_cut=False)
    assert later.dropped is not None and later.dropped.reason == TOO_LONG


def test_reasoning_is_split_from_the_answer(thinking_chat: Chat) -> None:
    talk = start(thinking_chat)
    talk.take(thought("because\n", END_THINK_ID, "\n\n42"), keeps_cut=False)
    message = talk.row({}).messages[-1]
    assert (message["reasoning_content"], message["content"]) == ("because", "42")


def test_unfinished_thinking_is_never_taken_for_an_answer(thinking_chat: Chat, chat: Chat) -> None:
    stopped = start(thinking_chat)
    stopped.take(thought("a monologue"), keeps_cut=True)
    assert stopped.dropped is not None and stopped.dropped.reason == OPEN_THINKING
    for talk, choice in (
        (start(thinking_chat), thought("a monologue", is_stopped=False)),
        (start(chat), thought(THINK_ID, "\na monologue", is_stopped=False)),
    ):
        talk.take(choice, keeps_cut=True)
        message = talk.row({}).messages[-1]
        assert (message["reasoning_content"], message["content"]) == ("a monologue", "")
    silent = start(thinking_chat)
    silent.take(thought("because", END_THINK_ID, "\n\n"), keeps_cut=True)
    assert silent.dropped is not None and silent.dropped.reason == EMPTY


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("just this", False, (None, "just this")),
        ("<think>\nwhy\n</think>\n\nso", False, ("why", "so")),
        ("why\n</think>\n\nso", True, ("why", "so")),
        ("\n</think>\n\nso", True, ("", "so")),
        ("a </think> b </think> c", False, ("a ", " b </think> c")),
    ],
)
def test_text_is_split_at_the_first_closing_tag(text: str, is_thinking: bool, expected: tuple[str, str]) -> None:
    assert split_reasoning(text, is_thinking=is_thinking) == expected
