"""A prompt that shares a run of tokens with an evaluation set is found, with the row it shares it with; no other is."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.errors import InputError
from draftmill.generate.exclusion import Exclusion
from draftmill.storage.row_files import find_row_file
from tiny_tokenizer import write_tiny_tokenizer

WORDS = [
    f"{first}{second}a" for first in ("alph", "bet", "gamm", "delt") for second in ("ill", "or", "und", "in", "es")
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(write_tiny_tokenizer(tmp_path_factory.mktemp("target")))


def excluding(chat: Chat, folder: Path, *rows: Any, run_tokens: int = 13) -> Exclusion:
    file = folder / "eval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Exclusion([find_row_file(str(file))], chat, run_tokens)


def says(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def test_runs_are_found_as_a_naive_search_finds_them(chat: Chat, tmp_path: Path) -> None:
    rng = random.Random(5)
    evaluation = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 30))) for _ in range(40)]
    excluded = excluding(chat, tmp_path, *({"prompt": text} for text in evaluation), run_tokens=9)

    def windows(text: str) -> set[tuple[int, ...]]:
        ids = chat.encode(text)
        return {tuple(ids[i : i + 9]) for i in range(len(ids) - 8)}

    held = {f"eval.jsonl line {n}": windows(text) for n, text in enumerate(evaluation, start=1)}
    outcomes = set()
    for _ in range(200):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 8)))
        asked = windows(text)
        sharing = {place for place, runs in held.items() if runs & asked}
        found = excluded.find(says(text))
        assert found in sharing if sharing else found is None
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_the_row_is_named_and_system_messages_do_not_count_and_short_texts_count_whole(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = " ".join(WORDS)
    excluded = excluding(
        chat,
        tmp_path,
        {"messages": [*says("a helpful assistant of great patience " * 3, "system"), *says("what?")]},
        {"question": {"text": [f"Please sort: {shared}"]}, "answer": 7},
    )
    assert "1 texts are shorter" in caplog.text
    assert excluded.find(says(f"other words before {shared} and after")) == "eval.jsonl line 2"
    assert excluded.find([*says("no"), *says(f"x {shared}")]) == "eval.jsonl line 2"
    assert excluded.find(says(shared, "system")) is None
    assert excluded.find(says("a helpful assistant of great patience " * 3)) is None
    assert excluded.find(says("what? now?")) is None
    assert excluded.find(says("what?")) == "eval.jsonl line 1"
    assert excluded.find([{"role": "assistant", "content": None}]) is None


def test_a_file_without_texts_is_refused(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: no text"):
        excluding(chat, tmp_path, {"n": 1})
    with pytest.raises(InputError, match="no rows"):
        excluding(chat, tmp_path)
