"""A row becomes the samples the target itself made: its own ids verbatim where they are known, its render elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from completions import samples_of
from draftmill.chat.chat import open_chat
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.rows import RowMaker, RowMakerSpec
from draftmill.tokenize.samples import Sample
from tiny_tokenizer import write_tiny_tokenizer

END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), thinking=True)


def _row(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": content} if role == "user" else {"role": "assistant", "content": "?", **content}
        for role, content in turns
    ]
    return {"id": "r", "messages": messages, **more}


def _make(folder: Path, row: dict[str, Any], turns: Turns = "faithful", max_tokens: int = 1000) -> list[Sample]:
    batch = RowMaker(RowMakerSpec(folder, turns, max_tokens)).make([(1, json.dumps(row).encode())], "a.jsonl")
    assert len(batch.dropped) == (not batch.sample_ids)
    return samples_of(batch)


def _ids(prompt: list[int], answer: list[int]) -> tuple[str, Any]:
    return "assistant", {"prompt_token_ids": prompt, "token_ids": answer}


def _plain(sample: Sample) -> tuple[str, list[int], list[int], bool]:
    return sample.id, sample.input_ids.tolist(), sample.loss_mask.astype(int).tolist(), sample.truncated


def test_the_engine_s_ids_are_the_sample(folder: Path):
    row = _row(("user", "hi"), _ids([50, 51, 52], [60, 61, END]), finish_reason="stop")
    assert [_plain(s) for s in _make(folder, row)] == [("r", [50, 51, 52, 60, 61, END], [0, 0, 0, 1, 1, 1], False)]


def test_turns_join_where_each_is_the_beginning_of_the_next_prompt(folder: Path):
    row = _row(("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 60, END, 70, 71], [80, 81]))
    (sample,) = _make(folder, row)
    assert _plain(sample) == ("r", [50, 60, END, 70, 71, 80, 81], [0, 1, 1, 0, 0, 1, 1], False)


def test_a_rewritten_prompt_makes_a_sample_of_its_own(folder: Path):
    row = _row(
        ("user", "a"),
        _ids([50], [60, 61, END]),
        ("user", "b"),
        _ids([50, 61, END, 70], [80, END]),  # the reasoning 60 is gone from the history
        ("user", "c"),
        _ids([50, 61, END, 70, 80, END, 71], [90, END]),
    )
    first, second = _make(folder, row)
    assert _plain(first) == ("r#0", [50, 60, 61, END], [0, 1, 1, 1], False)
    joined = [50, 61, END, 70, 80, END, 71, 90, END]
    assert _plain(second) == ("r#2", joined, [0, 0, 0, 0, 1, 1, 0, 1, 1], False)


def test_last_takes_the_last_answer_alone(folder: Path):
    row = _row(("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 60, END, 70, 71], [80, 81]))
    (sample,) = _make(folder, row, "last")
    assert _plain(sample) == ("r", [50, 60, END, 70, 71, 80, 81], [0, 0, 0, 0, 0, 1, 1], False)
    plain = write_tiny_tokenizer(folder / "plain")
    assert _supervised(plain, _row(*PLAIN_TURNS)) == ["x<|im_end|>y z<|im_end|>"]
    assert _supervised(plain, _row(*PLAIN_TURNS), "last") == ["y z<|im_end|>"]


PLAIN_TURNS = [("user", "a"), ("assistant", {"content": "x"}), ("user", "b"), ("assistant", {"content": "y z"})]


def _supervised(folder: Path, row: dict[str, Any], turns: Turns = "faithful") -> list[str]:
    """What is supervised in each sample, as text."""
    chat = open_chat(folder)
    return [chat.decode(sample.input_ids[sample.loss_mask].tolist()) for sample in _make(folder, row, turns)]


@pytest.mark.parametrize("turns", ["faithful", "all", "expand"])
def test_engine_ids_join_only_where_they_continue_whatever_the_policy(folder: Path, turns: Turns):
    going_on = _row(("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 60, END, 70], [80, 81]))
    rewritten = _row(("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 61, END, 70], [80, 81]))
    assert [s.id for s in _make(folder, going_on, turns)] == ["r"]
    assert [s.id for s in _make(folder, rewritten, turns)] == ["r#0", "r#1"]


THINKING_TURNS = [
    ("user", "a"),
    ("assistant", {"content": "x", "reasoning_content": "t1"}),
    ("user", "b"),
    ("assistant", {"content": "y", "reasoning_content": "t2"}),
]


def test_each_policy_supervises_what_it_says(folder: Path):
    row = _row(*THINKING_TURNS)
    first, last = "t1\n</think>\n\nx<|im_end|>", "t2\n</think>\n\ny<|im_end|>"
    assert _supervised(folder, row) == _supervised(folder, row, "last") == [last]
    assert _supervised(folder, row, "all") == ["x<|im_end|>" + last], "as it stands in the history"
    assert _supervised(folder, row, "expand") == [first, last], "no earlier thinking is lost"
    assert [s.id for s in _make(folder, row, "expand")] == ["r#0", "r#1"]
    plain = write_tiny_tokenizer(folder / "plain")
    assert _supervised(plain, _row(*PLAIN_TURNS), "all") == _supervised(plain, _row(*PLAIN_TURNS))
    assert _supervised(plain, _row(*PLAIN_TURNS), "expand") == ["x<|im_end|>", "y z<|im_end|>"]


@pytest.mark.parametrize("turns", ["faithful", "expand"])
def test_no_two_samples_share_an_id_whatever_rows_are_called(folder: Path, turns: Turns):
    talk, single = THINKING_TURNS, THINKING_TURNS[:2]
    rewritten = [("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 61, END, 70], [80, 81])]
    rows = [_row(*talk, id="a"), _row(*single, id="a#0"), _row(*single, id="a#0#0"), _row(*single, id="a#")]
    rows += [_row(*rewritten, id="b"), _row(*single, id="b#1"), _row(*single, id="b#x")]
    lines = [(i, json.dumps(row).encode()) for i, row in enumerate(rows)]
    batch = RowMaker(RowMakerSpec(folder, turns, 1000)).make(lines, "a.jsonl")
    usual = ["a"] if turns == "faithful" else ["a#0", "a#1"]
    assert batch.sample_ids == [*usual, "a#0#0", "a#0#0#0", "a#", "b#0", "b#1", "b#1#0", "b#x"]


def test_history_that_came_with_the_prompt_is_not_the_target_s(folder: Path):
    row = _row(("user", "a"), ("assistant", {"content": "x"}), ("user", "b"), _ids([50, 51], [60, END]))
    (sample,) = _make(folder, row)
    assert _plain(sample) == ("r", [50, 51, 60, END], [0, 0, 1, 1], False)


def test_a_long_sample_is_cut_and_flagged_and_one_of_just_that_length_is_not(folder: Path):
    row = _row(("user", "hi"), _ids([50, 51], [60, 61, 62, END]))
    (cut,), (whole,) = _make(folder, row, max_tokens=5), _make(folder, row, max_tokens=6)
    assert _plain(cut) == ("r", [50, 51, 60, 61, 62], [0, 0, 1, 1, 1], True)
    assert whole.input_ids[-1] == END and not whole.truncated


def test_a_cut_sample_stays_while_it_holds_an_anchor(folder: Path):
    row = _row(("user", "hi"), _ids([50, 51], [60, 61, 62, END]))
    assert [_plain(s) for s in _make(folder, row, max_tokens=4)] == [("r", [50, 51, 60, 61], [0, 0, 1, 1], True)]
    assert _make(folder, row, max_tokens=3) == []


def test_a_render_of_an_unfinished_answer_has_no_end_that_nobody_generated(folder: Path):
    turns = [("user", "hi"), ("assistant", {"content": "apple", "reasoning_content": "why"})]
    cut, whole = _row(*turns, finish_reason="length"), _row(*turns, finish_reason="stop")
    assert _supervised(folder, cut) == ["why\n</think>\n\napple"]
    assert _make(folder, cut)[0].input_ids[-1] != END
    assert _supervised(folder, whole) == ["why\n</think>\n\napple<|im_end|>"]


def test_the_prompt_is_rendered_as_the_row_was_generated(folder: Path):
    turns = [("user", "hi"), ("assistant", {"content": "apple"})]
    asked = _row(*turns, sampling={"chat_template_kwargs": {"enable_thinking": False}})
    assert _supervised(folder, _row(*turns)) == ["</think>\n\napple<|im_end|>"]
    assert _supervised(folder, asked) == ["apple<|im_end|>"]
    spec = RowMakerSpec(folder, "faithful", 100, {"enable_thinking": False})
    (sample,) = samples_of(RowMaker(spec).make([(1, json.dumps(_row(*turns)).encode())], "a.jsonl"))
    assert _plain(sample) == _plain(_make(folder, asked)[0]), "for rows that do not say so themselves"


def test_what_follows_the_last_answer_does_not_cost_its_reasoning(folder: Path):
    turns = [("user", "hi"), ("assistant", {"content": "apple", "reasoning_content": "why"}), ("user", "and now?")]
    assert _supervised(folder, _row(*turns)) == ["why\n</think>\n\napple<|im_end|>"]


def _kwargs(**given: Any) -> dict[str, Any]:
    return _row(("user", "hi"), ("assistant", {"content": "x"}), sampling={"chat_template_kwargs": given})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("row", "max_tokens", "reason"),
    [
        (_row(("user", "hi")), 100, "no assistant turn"),
        (_row(("assistant", {"content": "x"})), 100, "the chat template refuses the row"),
        (_row(("user", "hi"), _ids([50], [END])), 100, "an answer of a single token"),
        (_row(("user", "hi"), _ids([50], [])), 100, "no answer behind the prompt the target saw"),
        (_row(("user", "hi"), _ids([50] * 9, [60, END])), 10, "nothing to learn from within max_tokens"),
        (_row(("user", "hi"), _ids([50], [10**6, END])), 100, "a token id that this tokenizer does not have"),
        (_row(("user", "hi"), ("assistant", {"token_ids": [60, END]})), 100, "not two lists of numbers"),
        (_row(("user", "hi"), _ids([50], [True, 1.0])), 100, "not two lists of numbers"),
        (_row(("user", "\ud83d"), ("assistant", {"content": "x"})), 100, "broken JSON"),
        (_kwargs(enable_thinkng=False), 100, "unknown template keyword"),
        (_kwargs(enable_thinking="false"), 100, "a template keyword is text"),
        (_kwargs(messages=[]), 100, "unknown template keyword"),
        (_row(("user", "hi"), ("assistant", {"content": "x"}), tools=[TOOL]), 100, "does not print tools"),
        (_row(("user", "hi"), ("assistant", {"tool_calls": [TOOL]})), 100, "does not print tool calls"),
        (_row(("user", "hi"), ("assistant", {"reasoning": ["x"]})), 100, "reasoning is not text"),
    ],
)
def test_a_row_without_a_sample_says_why(folder: Path, row: dict[str, Any], max_tokens: int, reason: str):
    batch = RowMaker(RowMakerSpec(folder, "faithful", max_tokens)).make([(4, json.dumps(row).encode())], "a.jsonl")
    assert batch.sample_ids == []
    assert reason in batch.dropped[0].reason and (batch.dropped[0].file, batch.dropped[0].line) == ("a.jsonl", 4)


def test_reasoning_that_a_template_would_not_print_is_refused(folder: Path):
    plain = write_tiny_tokenizer(folder / "plain")
    row = _row(("user", "hi"), ("assistant", {"content": "x", "reasoning_content": "lost"}))
    assert _make(folder, row) and not _make(plain, row)


def test_a_long_run_of_one_character_takes_no_time(folder: Path):
    row = _row(("user", "a" * 200_000), ("assistant", {"content": "apple", "reasoning_content": "b" * 200_000}))
    assert _make(folder, row, max_tokens=10**6)[0].loss_mask.any()
