"""Every line is seen once in each of two passes: a prompt of one split and one part, or left out with its place."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import InputError, RecipeError
from draftmill.contracts.split import is_in_split
from draftmill.generate.intake import Intake
from draftmill.generate.prompts import Prompt, Reading
from draftmill.generate.survey import Survey, survey
from draftmill.settings.generate import GenerateSettings
from draftmill.storage.row_files import find_row_files
from draftmill.storage.store import open_store

OWN = Reading("own", imports=False)


def write(file: Path, *lines: Any) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(file)


def look(*files: str, reading: Reading = OWN, **settings: Any) -> Survey:
    chosen = GenerateSettings(input=files, output=("out",), target="t", **settings)
    return survey(find_row_files(files), chosen, reading)


def units(found: Survey, reading: Reading = OWN) -> list[list[Prompt | Dropped]]:
    intake = Intake(found, reading)
    return [list(intake.units(span)) for span in found.spans]


def ids(found: Iterable[Prompt | Dropped]) -> list[str]:
    return [unit.id for unit in found if isinstance(unit, Prompt)]


def drops(found: Iterable[Prompt | Dropped]) -> list[tuple[str, int, str | None, str]]:
    return [(u.file, u.line, u.id, u.reason) for u in found if isinstance(u, Dropped)]


def test_rows_left_out_keep_their_place_and_reason(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "hi"}
    file = write(tmp_path / "p.jsonl", row, "", "{broken", row, {"id": "s", "messages": []}, {"prompt": "x"})
    (part,) = units(look(file))
    assert ids(part)[0] == "a" and len(ids(part)) == 2
    assert drops(part) == [
        ("p.jsonl", 3, None, "broken JSON"),
        ("p.jsonl", 4, "a", "id of an earlier row"),
        ("p.jsonl", 5, "s", "no messages"),
    ]


def test_an_id_repeated_in_another_file_is_asked_once(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", {"id": 7, "prompt": "hi"})
    second = write(tmp_path / "2.jsonl", {"id": "7", "prompt": "ho"}, {"id": "8", "prompt": "ha"})
    (part,) = units(look(first, second))
    assert ids(part) == ["7", "8"]
    assert drops(part) == [("2.jsonl", 1, "7", "id of an earlier row")]


def test_content_repeated_under_another_id_is_asked_once_and_never_lost(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "one"},
        {"id": "a", "prompt": "two"},  # dropped for its id, so it does not speak for "two"
        {"id": "b", "prompt": "two"},
        {"id": "c", "prompt": "two", "response": "recorded"},
        {"id": "d", "messages": []},  # no prompt, so it does not claim its id
        {"id": "d", "prompt": "three"},
    )
    (part,) = units(look(file))
    assert ids(part) == ["a", "b", "d"]
    assert [(line, reason) for _, line, _, reason in drops(part)] == [
        (2, "id of an earlier row"),
        (4, "content of an earlier row"),
        (5, "no messages"),
    ]


def test_no_content_stands_on_both_sides_of_the_split(tmp_path: Path) -> None:
    rows = [{"id": f"{n}-{copy}", "prompt": f"p{n}"} for n in range(50) for copy in range(2)]
    file = write(tmp_path / "p.jsonl", *rows)
    sides = [units(look(file, split=side, held_out_frac=0.5)) for side in ("train", "held-out")]
    asked = [[p.turns[0][0]["content"] for part in side for p in part if isinstance(p, Prompt)] for side in sides]
    assert len(asked[0]) > 10 < len(asked[1])
    assert sorted(asked[0] + asked[1]) == sorted({f"p{n}" for n in range(50)})


def test_each_line_falls_on_one_side_of_the_split_and_order_does_not_matter(tmp_path: Path) -> None:
    lines = [{"id": str(n), "prompt": f"x{n}"} for n in range(200)] + ["{broken", "{also broken"]
    file = write(tmp_path / "p.jsonl", *lines)
    sides = {s: look(file, split=s, held_out_frac=0.3) for s in ("train", "held-out")}
    asked = {s: {i for part in units(found) for i in ids(part)} for s, found in sides.items()}
    assert asked["train"] | asked["held-out"] == {str(n) for n in range(200)}
    assert not asked["train"] & asked["held-out"]
    assert 40 < len(asked["held-out"]) < 80
    assert [found.num_rows + found.num_other for found in sides.values()] == [202, 202]
    assert sum(len(drops(part)) for found in sides.values() for part in units(found)) == 2
    back = look(write(tmp_path / "back.jsonl", *lines[::-1]), split="held-out", held_out_frac=0.3)
    assert {i for part in units(back) for i in ids(part)} == asked["held-out"]


def test_parts_are_rows_of_the_split_cut_at_any_place_and_over_files(tmp_path: Path) -> None:
    rng = random.Random(3)
    for case in range(30):
        rows = [{"id": f"{case}-{n}", "prompt": f"x{rng.randrange(30)}"} for n in range(rng.randrange(1, 40))]
        lines = [rng.choice([row, row, row, row, "", "{"]) for row in rows]
        cut, size = rng.randrange(len(lines) + 1), rng.randrange(1, 9)
        files = [
            write(tmp_path / f"{case}" / f"{n}.jsonl", *piece) for n, piece in enumerate((lines[:cut], lines[cut:]))
        ]
        if not any(isinstance(line, dict) and is_in_split(line["id"], "train", 0.3) for line in lines):
            continue
        found = look(*files, part_rows=size, split="train", held_out_frac=0.3)
        parts = units(found)
        assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1) and 0 < len(parts[-1]) <= size
        assert [span.num_asked for span in found.spans] == [len(ids(part)) for part in parts]
        # A later part alone is the same as after the others.
        assert list(Intake(found, OWN).units(found.spans[-1])) == parts[-1]
        contents = [u.row.messages for part in parts for u in part if isinstance(u, Prompt)]
        wanted = {line["prompt"] for line in lines if isinstance(line, dict) and is_in_split(line["id"], "train", 0.3)}
        held_first = len({m[0]["content"] for m in contents})
        assert held_first == len(contents) <= len(wanted)


def test_the_plan_names_lines(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "p.jsonl", *({"id": f"a{n}", "prompt": f"a{n}"} for n in range(3)))
    second = write(tmp_path / "b" / "p.jsonl", "", *({"id": f"b{n}", "prompt": f"b{n}"} for n in range(3)))
    found = look(first, second, part_rows=2)
    assert [found.pieces(span) for span in found.spans] == [
        ("a/p.jsonl:1-2",),
        ("a/p.jsonl:3-3", "b/p.jsonl:2-2"),
        ("b/p.jsonl:3-4",),
    ]
    with pytest.raises(RecipeError, match="given twice"):
        look(first, first)


def test_a_file_that_changed_between_the_passes_is_noticed(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": f"x{n}"} for n in range(6)]
    for changed in (rows[:5], [*rows[:2], {"id": "2", "prompt": "other"}, *rows[3:]], rows[1:]):
        found = look(write(tmp_path / "p.jsonl", *rows), part_rows=2)
        write(tmp_path / "p.jsonl", *changed)
        with pytest.raises(InputError, match="changed while it was read"):
            units(found)


def test_a_row_that_changed_between_the_passes_is_not_asked(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": f"x{n}"} for n in range(4)]
    found = look(write(tmp_path / "p.jsonl", *rows))
    write(tmp_path / "p.jsonl", *rows[:2], {"id": "2", "prompt": "other"}, rows[3])
    taken = Intake(found, Reading("own", imports=False)).units(found.spans[0])
    assert [next(taken).id, next(taken).id] == ["0", "1"]
    with pytest.raises(InputError, match="changed while it was read"):
        next(taken)


def test_replayed_turns_are_counted_as_prompts(tmp_path: Path) -> None:
    trace = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    found = look(write(tmp_path / "p.jsonl", {"id": "t", "messages": trace}), reading=Reading("replay", imports=False))
    assert (found.num_rows, found.spans[0].num_asked) == (1, 2)
    assert ids(units(found, Reading("replay", imports=False))[0]) == ["t#0", "t#1"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: no such file"):
        look(str(tmp_path / "none.jsonl"))
    with pytest.raises(RecipeError, match=r"read from \.jsonl, \.jsonl\.gz, \.jsonl\.zst, \.parquet files"):
        look(str(tmp_path))
    with pytest.raises(InputError, match=r"empty\.jsonl: no rows"):
        look(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match=r"bad\.jsonl line 1: broken JSON"):
        look(write(tmp_path / "bad.jsonl", "{"))
    with pytest.raises(InputError, match="none of 1 rows falls into --split held-out"):
        look(write(tmp_path / "one.jsonl", {"id": "1", "prompt": "x"}), split="held-out", held_out_frac=0.0)


def test_prompts_in_an_object_store_are_read_like_local_ones(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    local = write(tmp_path / "p.jsonl", {"id": "1", "prompt": "x"})
    open_store(s3_url).put("p.jsonl", Path(local))
    far, near = look(f"{s3_url}/p.jsonl"), look(local)
    assert (far.inputs, far.spans, units(far)) == (near.inputs, near.spans, units(near))
    with pytest.raises(InputError, match=r"none\.jsonl: no such file"):
        look(f"{s3_url}/none.jsonl")
