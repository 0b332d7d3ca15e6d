"""A row becomes the samples the target itself made: its own ids verbatim where they are known, its render elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from draftmill.contracts.rows import Row, RowError
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.samples import Sample, SampleMaker, open_sample_maker
from tiny_tokenizer import write_tiny_tokenizer

END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), thinking=True)


def _maker(folder: Path, turns: Turns = "faithful", max_tokens: int = 1000) -> SampleMaker:
    return open_sample_maker(folder, turns, max_tokens)


def _row(*turns: tuple[str, Any], **more: Any) -> Row:
    messages = [
        {"role": "user", "content": content} if role == "user" else {"role": "assistant", "content": "?", **content}
        for role, content in turns
    ]
    return Row(id="r", messages=tuple(messages), **more)


def _ids(prompt: list[int], answer: list[int]) -> tuple[str, Any]:
    return "assistant", {"prompt_token_ids": prompt, "token_ids": answer}


def _plain(sample: Sample) -> tuple[str, list[int], list[int], bool]:
    return sample.id, sample.input_ids.tolist(), sample.loss_mask.astype(int).tolist(), sample.truncated


def test_the_engine_s_ids_are_the_sample(folder: Path):
    row = _row(("user", "hi"), _ids([50, 51, 52], [60, 61, END]), finish_reason="stop")
    assert [_plain(s) for s in _maker(folder)(row)] == [("r", [50, 51, 52, 60, 61, END], [0, 0, 0, 1, 1, 1], False)]


def test_turns_join_where_each_is_the_beginning_of_the_next_prompt(folder: Path):
    row = _row(("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 60, END, 70, 71], [80, 81]))
    (sample,) = _maker(folder)(row)
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
    first, second = _maker(folder)(row)
    assert _plain(first) == ("r#0", [50, 60, 61, END], [0, 1, 1, 1], False)
    joined = [50, 61, END, 70, 80, END, 71, 90, END]
    assert _plain(second) == ("r#2", joined, [0, 0, 0, 0, 1, 1, 0, 1, 1], False)


def test_last_takes_the_last_answer_alone(folder: Path):
    row = _row(("user", "a"), _ids([50], [60, END]), ("user", "b"), _ids([50, 60, END, 70, 71], [80, 81]))
    (sample,) = _maker(folder, "last")(row)
    assert _plain(sample) == ("r", [50, 60, END, 70, 71, 80, 81], [0, 0, 0, 0, 0, 1, 1], False)

    turns = [("user", "a"), ("assistant", {"content": "x"}), ("user", "b"), ("assistant", {"content": "y z"})]
    plain = write_tiny_tokenizer(folder / "plain")
    assert _supervised(_maker(plain), _row(*turns)) == "x<|im_end|>y z<|im_end|>"
    assert _supervised(_maker(plain, "last"), _row(*turns)) == "y z<|im_end|>"


def _supervised(maker: SampleMaker, row: Row) -> str:
    (sample,) = maker(row)
    return maker.chat.decode(sample.input_ids[sample.loss_mask].tolist())


def test_history_that_came_with_the_prompt_is_not_the_target_s(folder: Path):
    row = _row(("user", "a"), ("assistant", {"content": "x"}), ("user", "b"), _ids([50, 51], [60, END]))
    (sample,) = _maker(folder)(row)
    assert _plain(sample) == ("r", [50, 51, 60, END], [0, 0, 1, 1], False)


def test_a_long_sample_is_cut_and_flagged_and_one_of_just_that_length_is_not(folder: Path):
    row = _row(("user", "hi"), _ids([50, 51], [60, 61, 62, END]))
    (cut,), (whole,) = _maker(folder, max_tokens=5)(row), _maker(folder, max_tokens=6)(row)
    assert _plain(cut) == ("r", [50, 51, 60, 61, 62], [0, 0, 1, 1, 1], True)
    assert whole.input_ids[-1] == END and not whole.truncated


def test_a_render_of_an_unfinished_answer_has_no_end_that_nobody_generated(folder: Path):
    turns = [("user", "hi"), ("assistant", {"content": "apple", "reasoning_content": "why"})]
    cut, whole = _row(*turns, finish_reason="length"), _row(*turns, finish_reason="stop")
    assert _supervised(_maker(folder), cut) == "why\n</think>\n\napple"
    assert _maker(folder)(cut)[0].input_ids[-1] != END
    assert _supervised(_maker(folder), whole) == "why\n</think>\n\napple<|im_end|>"


def test_the_prompt_is_rendered_as_the_row_was_generated(folder: Path):
    turns = [("user", "hi"), ("assistant", {"content": "apple"})]
    asked = _row(*turns, sampling={"chat_template_kwargs": {"enable_thinking": False}})
    assert _supervised(_maker(folder), _row(*turns)) == "</think>\n\napple<|im_end|>"
    assert _supervised(_maker(folder), asked) == "apple<|im_end|>"


def test_what_follows_the_last_answer_does_not_cost_its_reasoning(folder: Path):
    turns = [("user", "hi"), ("assistant", {"content": "apple", "reasoning_content": "why"}), ("user", "and now?")]
    assert _supervised(_maker(folder), _row(*turns)) == "why\n</think>\n\napple<|im_end|>"


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
        (_row(("user", "\ud83d"), ("assistant", {"content": "x"})), 100, "not valid Unicode text"),
    ],
)
def test_a_row_without_a_sample_says_why(folder: Path, row: Row, max_tokens: int, reason: str):
    with pytest.raises(RowError, match=reason):
        _maker(folder, max_tokens=max_tokens)(row)


def test_a_long_run_of_one_character_takes_no_time(folder: Path):
    row = _row(("user", "a" * 200_000), ("assistant", {"content": "apple", "reasoning_content": "b" * 200_000}))
    assert _maker(folder, max_tokens=10**6)(row)[0].loss_mask.any()
