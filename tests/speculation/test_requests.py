"""Promises: decoded prompts are chosen by a hash, evenly over the families, and a prefix of the choice is even too."""

from collections import Counter
from pathlib import Path

import pytest

from completion_sets import write_completions
from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import Row
from draftmill.speculation.requests import Request, choose, read_material
from tiny import VOCAB_SIZE, write_tiny_tokenizer

MANY = [Request(f"{family}{index}", family, (1,), (2, 3)) for family in "abc" for index in range(10)]


def test_the_choice_is_even_over_the_families_and_so_are_its_prefixes():
    chosen = choose(MANY, ["c"], 8, seed=0)
    assert Counter(request.family for request in chosen) == {"a": 4, "b": 4}
    assert Counter(request.family for request in chosen[:4]) == {"a": 2, "b": 2}


def test_the_choice_depends_on_ids_and_seed_and_never_on_position():
    assert choose(MANY[::-1], [], 6, seed=0) == choose(MANY, [], 6, seed=0)
    assert choose(MANY, [], 6, seed=1) != choose(MANY, [], 6, seed=0)
    assert choose(MANY, [], 6, seed=0) != choose(MANY, [], 30, seed=0)[::-1][:6]


def test_a_short_family_is_taken_whole_and_the_others_fill_up():
    some = [request for request in MANY if request.family != "a" or request.id == "a0"]
    assert Counter(request.family for request in choose(some, [], 7, seed=0)) == {"a": 1, "b": 3, "c": 3}


def test_no_headline_family_is_an_error():
    with pytest.raises(InputError, match="reported apart"):
        choose(MANY, ["a", "b", "c"], 3, seed=0)


@pytest.mark.parametrize("turn", [{"token_ids": [4, VOCAB_SIZE]}, {"prompt_token_ids": [VOCAB_SIZE]}])
def test_tokens_beyond_the_targets_vocabulary_are_refused_with_file_line_and_row(tmp_path: Path, turn: dict) -> None:
    said = {"role": "assistant", "content": "x", "prompt_token_ids": [1], "token_ids": [2]}
    messages = [({"role": "user", "content": "x"}, {**said, **changed}) for changed in ({}, turn)]
    write_completions(tmp_path / "set", [Row(id=f"r{i}", messages=both) for i, both in enumerate(messages)])
    chat = open_chat(write_tiny_tokenizer(tmp_path / "target"))
    with pytest.raises(
        InputError, match=rf"part-00000.jsonl line 2: row 'r1' holds token id {VOCAB_SIZE}, but .* 272 "
    ):
        read_material([str(tmp_path / "set")], chat, VOCAB_SIZE)
    assert len(read_material([str(tmp_path / "set")], chat, VOCAB_SIZE + 1).requests) == 2
