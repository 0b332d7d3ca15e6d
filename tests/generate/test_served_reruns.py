"""A rerun does what is left and nothing else: failed rows, another place, a full disk, another run at the same time."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from completion_sets import aside_of, card_of, check_parts, check_whole, lost_in, records_of, rows_of
from draftmill.contracts.errors import DataGateError
from draftmill.storage.sets import open_set
from draftmill.storage.store import open_store
from generate.served_runs import Desk, stub_at_work
from generate.test_served_run import ids, wait_for
from tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def desk(tmp_path: Path, plain: Path) -> Desk:
    return Desk(tmp_path, plain, {"part_rows": 4})


def test_failed_rows_are_listed_and_a_rerun_asks_for_exactly_them(desk: Desk) -> None:
    faults = {1: "[[400 x1]]", 5: "[[503 x3]]", 6: "[[surrogate]]", 9: "[[400]]"}
    desk.prompts([f"prompt {n} {faults.get(n, '')}" for n in range(12)])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url, max_failed_frac=0.2) == 0
        check_whole(desk.out, (f"r{n}" for n in range(12)))
        failed = {row["id"]: (row["line"], row["reason"]) for row in lost_in(desk.out, "failed")}
        assert failed == {
            "r1": (2, "refused with HTTP 400"),
            "r5": (6, "given up after repeated failures"),
            "r9": (10, "refused with HTTP 400"),
        }
        assert {row["id"] for row in card_of(desk.out)["failed_rows"]} == failed.keys()
        before = {row["id"]: row for row in rows_of(desk.out)}
        untouched = (desk.out / "part-00000.json").stat().st_mtime_ns, len(stub.asked)

        assert desk.generate(url, max_failed_frac=0.2) == 0
        asked = [body["messages"][-1]["content"].split()[1] for body in stub.asked[untouched[1] :]]
        assert sorted(n for n in asked if n.isdigit()) == ["1", "5", "9"]
    check_whole(desk.out, (f"r{n}" for n in range(12)))
    assert ids(lost_in(desk.out, "failed")) == ["r9"] and ids(aside_of(desk.out)) == ["r6"]
    made = rows_of(desk.out)
    assert ids(made) == [f"r{n}" for n in range(12) if n not in (6, 9)]  # in the order of the prompts
    assert all(row == before.get(row["id"], row) for row in made)
    assert card_of(desk.out)["rows"] == 10 and card_of(desk.out)["completion_tokens"] == sum(
        len(m["token_ids"]) for row in made for m in row["messages"] if m["role"] == "assistant"
    )


def test_too_many_failures_are_refused_with_what_was_answered_kept(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.prompts([f"prompt {n} {'[[400 x1]]' if n < 5 else ''}" for n in range(12)])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url) == 3
        assert "5 of 12 rows (41.7%) failed: run the same command again" in capsys.readouterr().err
        assert len(rows_of(desk.out)) == 7 and not (desk.out / "card.json").exists()
        with pytest.raises(DataGateError, match=r"(?s)gate of draftmill generate refused it.*5 of 12 rows .* failed"):
            open_set(str(desk.out), "generate")
        num_asked = len(stub.asked)
        assert desk.generate(url) == 0
        assert len(stub.asked) == num_asked + 5 + 1  # and the probe
    check_whole(desk.out, (f"r{n}" for n in range(12)))


def test_a_finished_set_stays_one_when_its_engine_is_gone(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.prompts(["prompt 0", "prompt 1 [[400]]"])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        assert desk.generate(url) == 0
    before = {file: file.read_bytes() for file in desk.out.iterdir()}
    assert desk.generate(url) == 0
    for keep_finished in (False, True):  # the row that failed is asked again, unless the set is to stay
        assert desk.generate(url, dry_run=True, keep_finished=keep_finished) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (told["left"], told["done"]) == ([], keep_finished)
    assert before == {file: file.read_bytes() for file in desk.out.iterdir()}


def test_a_run_killed_at_any_file_of_a_second_try_ends_whole(desk: Desk, tmp_path: Path) -> None:
    """The old card stays true until the new one stands, and nothing is left lying about."""
    desk.prompts([f"prompt {n} {'[[400 x1]]' if n in (1, 6) else ''}" for n in range(8)])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        assert desk.generate(url) == 0
        shutil.copytree(desk.out, tmp_path / "first")
        assert desk.generate(url) == 0
        written = sorted((f for f in desk.out.iterdir()), key=lambda f: f.stat().st_mtime_ns)
        new = [f for f in written if not (tmp_path / "first" / f.name).exists() or f.name.endswith(".json")]
        order = [f for f in new if f.name != "plan.json"]
        assert [f.name for f in order][-1] == "card.json" and len(order) == 5
        for count in range(len(order) + 1):
            shutil.copytree(tmp_path / "first", tmp_path / str(count) / "out")
            for file in order[:count]:
                shutil.copy(file, tmp_path / str(count) / "out" / file.name)
            again = Desk(tmp_path / str(count), desk.tokenizer, desk.flags)
            shutil.copy(desk.folder / "p.jsonl", again.folder)
            card = json.loads((again.out / "card.json").read_bytes())
            for part in card["content"]["parts"]:
                assert (again.out / part["file"]).stat().st_size == part["bytes"]
            assert again.generate(url) == 0
            check_whole(again.out, (f"r{n}" for n in range(8)))


def test_two_runs_at_once_exclude_each_other(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.prompts(["prompt 0 [[stall=30 x1]]", *(f"prompt {n}" for n in range(1, 8))])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        first = desk.start(url)
        wait_for(lambda: len(records_of(desk.out)) == 1, first)
        assert desk.generate(url) == 1
        assert "another run of draftmill generate is at work" in capsys.readouterr().err
        # Another spool, or another set in the same place, is no way around it.
        assert desk.generate(url, spool=str(desk.folder / "other")) == 1
        assert desk.generate(url, max_new_tokens=7) == 1
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        assert desk.generate(url) == 0
        assert stub.hits["prompt 5"] == 1
    check_whole(desk.out, (f"r{n}" for n in range(8)))


def test_two_runs_started_together_make_one_set(desk: Desk) -> None:
    desk.prompts([f"prompt {n}" for n in range(40)])
    with stub_at_work(tokenizer=desk.tokenizer, latency_s=0.05) as (stub, url):
        runs = [desk.start(url) for _ in range(2)]
        codes = [run.communicate() and run.returncode for run in runs]
        assert 0 in codes and set(codes) <= {0, 1}
        assert all(stub.hits[f"prompt {n}"] == 1 for n in range(40))
    check_whole(desk.out, (f"r{n}" for n in range(40)))


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(desk: Desk) -> None:
    desk.prompts([f"prompt {n}" for n in range(12)])
    with stub_at_work(tokenizer=desk.tokenizer, answer_tokens=200) as (stub, url):
        full = desk.start(url, limit_bytes=6000)
        _, stderr = full.communicate()
        assert full.returncode == 1 and "make room there" in stderr and "Traceback" not in stderr
        saved = set(desk.spooled()) | set(ids(rows_of(desk.out)))
        assert 0 < len(saved) < 12
        check_parts(desk.out)
        hits = dict(stub.hits)
        assert desk.generate(url) == 0
        assert all(stub.hits[f"prompt {row_id[1:]}"] == hits[f"prompt {row_id[1:]}"] for row_id in saved)
    check_whole(desk.out, (f"r{n}" for n in range(12)))


def test_an_output_added_later_is_filled_without_asking_again(desk: Desk, tmp_path: Path) -> None:
    desk.prompts([f"prompt {n} {'[[empty]]' if n == 2 else ''}" for n in range(8)])
    both = [str(desk.out), str(tmp_path / "second")]
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url) == 0
        num_asked = len(stub.asked)
        assert desk.generate(url, output=both) == 0
        assert len(stub.asked) == num_asked
        (tmp_path / "second" / "part-00000.json").unlink()
        (tmp_path / "second" / "part-00001.jsonl.zst").write_bytes(b"cut")
        assert desk.generate(url, output=both) == 0
        assert len(stub.asked) == num_asked
    for place in both:
        check_whole(Path(place), (f"r{n}" for n in range(8)))
    files = [{f.name: f.read_bytes() for f in Path(place).glob("part*")} for place in both]
    assert files[0] == files[1]


def test_a_set_in_an_object_store_goes_on_after_a_kill(desk: Desk, s3_url: str, tmp_path: Path) -> None:
    desk.prompts([f"prompt {n}" if n != 6 else "prompt 6 [[stall=30 x1]]" for n in range(8)])
    store = open_store(s3_url)
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        process = desk.start(url, output=s3_url, input=str(desk.folder / "p.jsonl"))
        wait_for(lambda: store.find("part-00000.json") is not None and len(desk.spooled()) == 3, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert desk.generate(url, output=s3_url) == 0
        assert all(stub.hits[f"prompt {n}"] == 1 for n in range(6))
    for file in store.files():
        (desk.out / file.key).parent.mkdir(parents=True, exist_ok=True)
        (desk.out / file.key).write_bytes(store.get(file.key))
    check_whole(desk.out, (f"r{n}" for n in range(8)))


def test_a_prompt_file_that_changes_during_the_run_stops_it(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    # Longer than what is read ahead.
    desk.prompts([f"prompt {n} " + ("[[stall=3 x1]]" if n == 9 else "word " * 3000) for n in range(60)])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        process = desk.start(url, max_in_flight=1)
        wait_for(lambda: len(records_of(desk.out)) == 2, process)
        desk.prompts([f"other {n}" for n in range(60)])
        _, stderr = process.communicate()
        assert process.returncode == 1 and "changed while it was read" in stderr
        check_parts(desk.out)
        assert desk.generate(url) == 2
    assert "its inputs differ" in capsys.readouterr().err


def test_answers_that_came_along_are_imported_without_an_engine(desk: Desk) -> None:
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        desk.prompts(["prompt 0", "prompt 1"])
        assert desk.generate(url) == 0
    logged = [*rows_of(desk.out), {**rows_of(desk.out)[0], "id": "lie"}]
    logged[2] = json.loads(json.dumps(logged[2]).replace("Answer", "Reply"))
    imported = Desk(desk.folder / "imported", desk.tokenizer, desk.flags)
    imported.prompts(logged)
    assert imported.generate("http://127.0.0.1:9/v1", import_answers=True) == 0
    assert [{k: row[k] for k in ("id", "messages")} for row in rows_of(imported.out)] == [
        {k: row[k] for k in ("id", "messages")} for row in logged[:2]
    ]
    assert card_of(imported.out)["dropped"] == {"token ids that say something else than the row's text": 1}


def test_prompts_of_an_evaluation_set_are_left_out_and_listed(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    shared = "count the red apples in the yellow box and list all colours that you see in it"
    desk.prompts(["prompt 0", f"Please {shared}", "prompt 2"])
    (desk.folder / "eval.jsonl").write_text(
        json.dumps({"question": "?"}) + "\n" + json.dumps({"question": shared}) + "\n"
    )
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url, exclude=str(desk.folder / "eval.jsonl"), licence="p.jsonl=CC-BY-4.0") == 0
        assert stub.hits[f"Please {shared}"] == 0
        (dropped,) = lost_in(desk.out, "dropped")
        assert (dropped["id"], dropped["line"], dropped["detail"]) == ("r1", 2, "eval.jsonl line 2")
        card = card_of(desk.out)
        assert [(s["name"], s["rows"], s["licence"]) for s in card["prompt_sets"]] == [("p.jsonl", 3, "CC-BY-4.0")]
        # A licence is no reason to ask anything again, but the card is to name it.
        assert desk.generate(url, exclude=str(desk.folder / "eval.jsonl"), licence="p.jsonl=MIT") == 0
        assert card_of(desk.out)["prompt_sets"][0]["licence"] == "MIT" and len(stub.asked) == 2 + 1
        assert desk.generate(url, exclude=str(desk.folder / "eval.jsonl"), licence="q.jsonl=MIT") == 2
    assert "NAME being one of p.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_parts_are_packed_as_asked(desk: Desk, compression: str) -> None:
    desk.prompts(["prompt 0", "prompt 1 [[empty]]"])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        assert desk.generate(url, compression=compression) == 0
    check_whole(desk.out, ["r0", "r1"])
    suffix = {"none": ".jsonl", "gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}[compression]
    assert {f.name for f in desk.out.glob("part*")} == {
        "part-00000.json",
        f"part-00000{suffix}",
        f"part-00000.aside{suffix}",
    }


def test_a_part_that_the_gate_refuses_is_kept_and_judged_again(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.prompts([f"prompt {n} [[tags]]" for n in range(4)])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        assert desk.generate(url, max_broken_frac=0.01) == 3
        told = capsys.readouterr().err
        assert "the gate refuses part-00000" in told and "--max-broken-frac" in told
        assert "If the engine was at fault, remove" in told and not list(desk.out.glob("part*"))
    # Nothing is left to ask, so no engine is needed.
    assert desk.generate(url, max_broken_frac=1.0, min_rows=1) == 3  # not one row is left
    assert len(aside_of(desk.out)) == 4 and "0 rows have an answer" in capsys.readouterr().err


def newcomers_errors(url: str) -> list[tuple[dict[str, Any], int, str]]:
    return [
        ({"endpoint": "http://127.0.0.1:9/v1"}, 1, "does not answer"),
        ({"endpoint": "http://me:secret@127.0.0.1:9/v1"}, 2, "may hold no password"),
        ({"served_name": "gpt"}, 1, "does not serve 'gpt' but 'stub'"),
        ({"endpoint": "127.0.0.1:9"}, 2, "is no URL"),
        ({"endpoint": None, "temperature": 0.5}, 2, "temperature 0.5 needs --endpoint"),
        ({"tokenizer": "/nowhere"}, 2, "/nowhere: no such folder"),
        ({"exclude": "/nowhere.jsonl"}, 1, "no such file"),
        ({"thinking": "on", "template_kwargs": {"enable_thinking": True}}, 2, "not both"),
        ({"template_kwargs": {"tools": 1}}, 2, "may not hold tools"),
        ({"licence": "MIT"}, 2, "NAME=LICENCE"),
        ({"input": "p.txt"}, 2, "rows are read from"),
    ]


def test_what_a_newcomer_gets_wrong_is_one_clear_message(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.prompts(["prompt"])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        for changes, code, words in newcomers_errors(url):
            assert desk.generate(url, **changes) == code, changes
            told = capsys.readouterr()
            assert words in told.err.replace("\n", " ") and "Traceback" not in told.err, changes
            assert json.loads(told.out.splitlines()[-1])["exit_code"] == code
    assert not list(desk.out.glob("part*")) if desk.out.exists() else True


def test_ids_can_be_demanded(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.prompts(["prompt"])
    with stub_at_work(tokenizer=desk.tokenizer, is_strict=True) as (_, url):
        assert desk.generate(url, require_token_ids=True) == 1
        assert f"{url}: no token ids are returned" in capsys.readouterr().err
        assert desk.generate(url) == 0
    assert "token_ids" not in rows_of(desk.out)[0]["messages"][-1]
