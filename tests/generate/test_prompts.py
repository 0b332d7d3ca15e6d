"""Every line of a prompt file is a prompt of one split, or left out with its reason; answers in it are asked anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.contracts.errors import InputError, RecipeError
from draftmill.contracts.rows import RowError
from draftmill.generate.prompts import PromptSet, cut_turns, read_prompts
from draftmill.settings.generate import GenerateSettings
from draftmill.storage.store import open_store


def write(file: Path, *lines: Any) -> str:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(file)


def read(*files: str, **settings: Any) -> PromptSet:
    return read_prompts(GenerateSettings(input=files, output=("out",), target="t", **settings))


def says(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]


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
        (("user", "assistant", "tool", "user"), "tool message"),
    ],
)
def test_a_row_without_something_to_answer_is_refused(roles: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        cut_turns(says(*roles))


def test_rows_left_out_keep_their_place_and_reason(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "hi"}
    file = write(
        tmp_path / "p.jsonl", row, "", "{broken", row, {"id": "s", "messages": says("system")}, {"prompt": "x"}
    )
    (part,) = read(file).parts
    assert part.prompts[0].row.id == "a" and len(part.prompts) == 2
    assert [(d.file, d.line, d.id, d.reason) for d in part.dropped] == [
        ("p.jsonl", 3, None, "broken JSON"),
        ("p.jsonl", 4, "a", "id of an earlier row"),
        ("p.jsonl", 5, "s", "no user message to answer"),
    ]


def test_an_id_repeated_in_another_file_is_asked_once(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", {"id": 7, "prompt": "hi"})
    second = write(tmp_path / "2.jsonl", {"id": "7", "prompt": "hi"}, {"id": "8", "prompt": "ho"})
    (part,) = read(first, second).parts
    assert [p.row.id for p in part.prompts] == ["7", "8"]


def test_each_line_falls_on_one_side_of_the_split_and_order_does_not_matter(tmp_path: Path) -> None:
    lines = [{"id": str(n), "prompt": "x"} for n in range(200)] + ["{broken", "{also broken"]
    file = write(tmp_path / "p.jsonl", *lines)
    sides = {s: read(file, split=s, held_out_frac=0.3) for s in ("train", "held-out")}
    ids = {s: {p.row.id for part in found.parts for p in part.prompts} for s, found in sides.items()}
    assert ids["train"] | ids["held-out"] == {str(n) for n in range(200)}
    assert not ids["train"] & ids["held-out"]
    assert 40 < len(ids["held-out"]) < 80
    counts = [sum(len(p.prompts) + len(p.dropped) for p in found.parts) + found.num_other for found in sides.values()]
    assert counts == [202, 202]
    assert sum(len(p.dropped) for found in sides.values() for p in found.parts) == 2
    back = read(write(tmp_path / "back.jsonl", *lines[::-1]), split="held-out", held_out_frac=0.3)
    assert {p.row.id for part in back.parts for p in part.prompts} == ids["held-out"]


def test_parts_are_cut_by_prompts(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *({"id": str(n), "prompt": "x"} for n in range(5)), "{broken")
    parts = read(file, part_rows=2).parts
    assert [(p.name, len(p.prompts), len(p.dropped)) for p in parts] == [
        ("part-00000", 2, 0),
        ("part-00001", 2, 0),
        ("part-00002", 1, 1),
    ]


def test_line_separators_inside_text_do_not_cut_a_row(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"id": "1", "prompt": text}, ensure_ascii=False) + "\n")
    assert read(str(file)).parts[0].prompts[0].turns[0][0]["content"] == text


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: no such file"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(RecipeError, match=r"read from \.jsonl files"):
        read(str(tmp_path))
    with pytest.raises(InputError, match=r"empty\.jsonl: no rows"):
        read(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(InputError, match=r"bad\.jsonl line 1: broken JSON"):
        read(write(tmp_path / "bad.jsonl", "{"))
    with pytest.raises(InputError, match="none of 1 rows falls into split 'held-out'"):
        read(write(tmp_path / "one.jsonl", {"id": "1", "prompt": "x"}), split="held-out", held_out_frac=0.0)


def test_prompts_in_an_object_store_are_read_like_local_ones(tmp_path: Path, s3_url: str) -> None:
    local = write(tmp_path / "p.jsonl", {"id": "1", "prompt": "x"})
    open_store(s3_url).put("p.jsonl", Path(local))
    assert read(f"{s3_url}/p.jsonl") == read(local)
    with pytest.raises(InputError, match=r"none\.jsonl: no such file"):
        read(f"{s3_url}/none.jsonl")
