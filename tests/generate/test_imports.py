"""A row that came with the target's own ids is kept as it is, judged like any other, and dropped where the ids lie."""

import json
from typing import Any

import pytest

from draftmill.chat.chat import open_chat
from draftmill.contracts.cards import Dropped
from draftmill.generate.answers import CUT, NO_THINKING
from draftmill.generate.conversation import Kept
from draftmill.generate.imports import FOREIGN_ID, NO_IDS, NO_PROMPT_IDS, OTHER_TEXT, taken_as_is
from draftmill.generate.manner import Manner
from draftmill.generate.prompts import Prompt, Reading
from draftmill.settings.generate import GenerateSettings
from tiny import END_THINK_ID, IM_END_ID, NUM_TOKENS, write_tiny_tokenizer


@pytest.fixture(scope="module")
def manner(tmp_path_factory: pytest.TempPathFactory) -> Manner:
    settings = GenerateSettings(input=("p",), output=("o",), target="t", import_answers=True)
    return Manner(open_chat(write_tiny_tokenizer(tmp_path_factory.mktemp("t"))), settings, None, 100, None)


def taken(manner: Manner, **answer: Any) -> Kept | Dropped:
    message = {"role": "assistant", "content": "hi", "prompt_token_ids": [1, 2], "token_ids": [*b"hi", IM_END_ID]}
    messages = [{"role": "user", "content": "say"}, {k: v for k, v in {**message, **answer}.items() if v is not None}]
    line = json.dumps({"id": "r", "messages": messages, "sampling": {"temperature": 1}}).encode()
    (prompt,) = Reading("own", imports=True).prompts("p.jsonl", 2, line)
    assert isinstance(prompt, Prompt)
    return taken_as_is(prompt, manner)


def test_a_row_with_true_ids_is_kept_as_it_is(manner: Manner) -> None:
    kept = taken(manner)
    assert isinstance(kept, Kept) and kept.reason is None
    row = json.loads(kept.data)
    assert (row["finish_reason"], row["sampling"]) == ("stop", {"temperature": 1})
    assert row["messages"][1]["token_ids"] == [*b"hi", IM_END_ID]
    assert (kept.figures.completion_tokens, kept.figures.prompt_tokens) == (3, 2)


def test_reasoning_and_tool_calls_are_part_of_what_the_ids_say(manner: Manner) -> None:
    ids = [*b"why\n", END_THINK_ID, *b"\n\nhi", IM_END_ID]
    assert isinstance(taken(manner, token_ids=ids, reasoning_content="why"), Kept)
    call = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert isinstance(taken(manner, token_ids=[*b"hi<call>f", IM_END_ID], **call), Kept)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"prompt_token_ids": None}, NO_PROMPT_IDS),
        ({"token_ids": []}, NO_IDS),
        ({"token_ids": ["h", "i"]}, NO_IDS),
        ({"token_ids": [True, 2]}, NO_IDS),
        ({"token_ids": [*b"hi", NUM_TOKENS]}, FOREIGN_ID),
        ({"prompt_token_ids": [-1]}, FOREIGN_ID),
        ({"token_ids": [*b"ho", IM_END_ID]}, OTHER_TEXT),
        ({"content": ""}, OTHER_TEXT),
        ({"token_ids": [*b"hi and more", IM_END_ID]}, OTHER_TEXT),
    ],
)
def test_ids_that_are_not_to_be_believed_drop_the_row(manner: Manner, answer: dict[str, Any], reason: str) -> None:
    dropped = taken(manner, **answer)
    assert isinstance(dropped, Dropped) and (dropped.reason, dropped.line, dropped.id) == (reason, 2, "r")


def test_a_row_is_judged_like_any_other(manner: Manner) -> None:
    cut = taken(manner, token_ids=[*b"hi"])
    assert isinstance(cut, Kept) and (cut.reason, json.loads(cut.data)["finish_reason"]) == (CUT, "length")
    thinking = Manner(manner.chat, manner.settings, None, 100, thinks=True)
    assert isinstance(other := taken(thinking), Kept) and other.reason == NO_THINKING


def test_an_earlier_answer_of_no_use_sets_the_row_aside_too(manner: Manner) -> None:
    def row(first: list[int]) -> bytes:
        given = [("user", None), ("assistant", first), ("user", None), ("assistant", [*b"hi", IM_END_ID])]
        ids = [{"prompt_token_ids": [1], "token_ids": ids} if ids else {} for _, ids in given]
        said = [{"role": role, "content": "hi", **more} for (role, _), more in zip(given, ids, strict=True)]
        return json.dumps({"id": "r", "messages": said}).encode()

    for first, reason in (([*b"hi"], CUT), ([*b"hi", IM_END_ID], None)):
        (prompt,) = Reading("own", imports=True).prompts("p.jsonl", 1, row(first))
        assert isinstance(prompt, Prompt)
        kept = taken_as_is(prompt, manner)
        assert isinstance(kept, Kept) and kept.reason == reason and kept.figures.answers == 2
