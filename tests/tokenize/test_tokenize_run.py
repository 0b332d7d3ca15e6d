"""The room from files to shards: every row accounted for, the same bytes always, resumable, readable by datasets."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import completions
from completions import row, with_engine_ids, write_rows
from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.cards import PartRecord, Plan, PlannedPart, make_card
from draftmill.contracts.errors import DataGateError, InputError, RecipeError, StorageError
from draftmill.settings.inspect import InspectSettings
from draftmill.storage.sets import SetWriter, open_set, open_set_writer
from draftmill.storage.store import sha256_of
from draftmill.tokenize.inspect import run as inspect
from draftmill.tokenize.pieces import shard_bytes
from draftmill.tokenize.run import run
from tiny_tokenizer import PLAIN_TEMPLATE, write_tiny_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    return write_tiny_tokenizer(tmp_path / "tokenizer")


def _parts(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("part-*"))}


def _samples(folder: Path) -> list[dict[str, Any]]:
    shards = sorted(folder.glob("part-*.arrow"))
    return [sample for shard in shards for sample in pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist()]


def test_every_row_is_kept_or_dropped_with_its_place_and_reason(tmp_path: Path, tokenizer: Path):
    rows = [
        row(0),
        b'{"id": "torn", "messages": [',
        row(1),
        {"id": "silent", "messages": [{"role": "user", "content": "hi"}]},
        row(0),
        {"id": "who", "messages": [{"role": "narrator", "content": "x"}]},
        b'{"id": "half", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b"",
        row(2),
    ]
    source = write_rows(tmp_path / "in" / "a.jsonl", rows)
    write_rows(tmp_path / "in" / "b.jsonl", [row(3), row(1)])

    content = run(completions.settings(tmp_path, source.parent, tokenizer))["content"]

    assert [s["id"] for s in _samples(tmp_path / "samples")] == ["row-0", "row-1", "row-2", "row-3"]
    assert content["rows_in"] == 10 == content["rows"] + sum(content["dropped"].values())
    assert content["dropped_rows"] == [
        {"file": "a.jsonl", "line": 2, "id": None, "reason": "broken JSON"},
        {"file": "a.jsonl", "line": 4, "id": "silent", "reason": "no assistant turn"},
        {"file": "a.jsonl", "line": 5, "id": "row-0", "reason": "duplicate id"},
        {"file": "a.jsonl", "line": 6, "id": "who", "reason": "unknown role"},
        {"file": "a.jsonl", "line": 7, "id": None, "reason": "broken JSON"},
        {"file": "b.jsonl", "line": 2, "id": "row-1", "reason": "duplicate id"},
    ]


def test_line_separators_of_unicode_are_text(tmp_path: Path, tokenizer: Path):
    odd = row(0)
    odd["messages"][1]["content"] = "one\u2028two\u2029three\u0085four\x0bfive\x0csix"
    source = write_rows(tmp_path / "a.jsonl", [odd])
    assert run(completions.settings(tmp_path, source, tokenizer))["content"]["rows"] == 1


def test_compressed_and_plain_files_give_the_same_samples(tmp_path: Path, tokenizer: Path):
    plain = write_rows(tmp_path / "plain" / "a.jsonl", [row(i) for i in range(4)])
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    squeezed = tmp_path / "squeezed"
    squeezed.mkdir()
    (squeezed / "a.jsonl.zst").write_bytes(pa.compress(plain.read_bytes(), codec="zstd", asbytes=True))
    folders = (plain.parent, packed, squeezed)
    for folder in folders:
        run(completions.settings(tmp_path / f"of-{folder.name}", folder, tokenizer))
    shards = {(tmp_path / f"of-{f.name}" / "samples" / "part-00000.arrow").read_bytes() for f in folders}
    assert len(shards) == 1


def test_parts_cut_a_file_at_any_byte_and_lose_no_line(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(9)])
    whole = [
        s["id"] for s in (run(completions.settings(tmp_path, source, tokenizer)), _samples(tmp_path / "samples"))[1]
    ]
    lines = source.read_bytes().splitlines(keepends=True)
    for part_bytes in (len(lines[0]), len(lines[0]) + 1, 700, 1201):
        place = tmp_path / str(part_bytes)
        card = run(completions.settings(place, source, tokenizer, part_bytes=part_bytes))
        assert [s["id"] for s in _samples(place / "samples")] == whole
        assert card["content"]["rows_in"] == 9, "no line is read twice"
        assert 2 <= len(card["content"]["parts"]) <= 9
    torn = write_rows(tmp_path / "torn.jsonl", [*(row(i) for i in range(6)), b'{"id"', *(row(i) for i in range(6, 9))])
    dropped = run(completions.settings(tmp_path / "t", torn, tokenizer, part_bytes=400))["content"]["dropped_rows"]
    assert [drop["line"] for drop in dropped] == [7]


def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "in" / "a.jsonl", [row(i % 7) for i in range(9)])
    alone = run(completions.settings(tmp_path / "1", source, tokenizer, part_bytes=400))
    together = run(completions.settings(tmp_path / "2", source, tokenizer, part_bytes=400, workers=2))
    assert len(alone["content"]["parts"]) > 2
    assert _parts(tmp_path / "1" / "samples") == _parts(tmp_path / "2" / "samples")
    assert alone["content_hash"] == together["content_hash"]


def test_a_rerun_makes_what_is_missing_and_nothing_else(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "in" / "a.jsonl", [row(i) for i in range(9)])
    chosen = completions.settings(tmp_path, source, tokenizer, part_bytes=400)
    card = run(chosen)
    folder = tmp_path / "samples"
    before = _parts(folder)
    # As after a kill between a part's data and its record.
    for name in ("part-00001.json", "card.json"):
        (folder / name).unlink()
    (folder / "part-00001.arrow").write_bytes(b"half")
    kept = (folder / "part-00000.arrow").stat().st_mtime_ns

    again = run(chosen)

    assert _parts(folder) == before and again["content_hash"] == card["content_hash"]
    assert (folder / "part-00000.arrow").stat().st_mtime_ns == kept
    closed = (folder / "card.json").stat().st_mtime_ns
    assert run(chosen) == again and (folder / "card.json").stat().st_mtime_ns == closed, "a whole set is left alone"
    assert not list((tmp_path / "cache" / "spool").iterdir())


def test_other_settings_or_another_template_are_another_set(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "in" / "a.jsonl", [row(i) for i in range(3)])
    run(completions.settings(tmp_path, source, tokenizer))
    with pytest.raises(RecipeError, match="max_tokens was 3072, is 20"):
        run(completions.settings(tmp_path, source, tokenizer, max_tokens=20))
    config = tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{# new #}" + PLAIN_TEMPLATE}))
    with pytest.raises(RecipeError, match="template_hash was"):
        run(completions.settings(tmp_path, source, tokenizer))


def test_datasets_reads_the_set(tmp_path: Path, tokenizer: Path):
    datasets = pytest.importorskip("datasets")
    source = write_rows(tmp_path / "in" / "a.jsonl", [b"x" * 500, *(row(i) for i in range(9)), b"x" * 900])
    card = run(completions.settings(tmp_path, source, tokenizer, part_bytes=400))

    loaded = datasets.load_from_disk(str(tmp_path / "samples"))

    assert loaded.column_names == ["id", "input_ids", "loss_mask", "truncated"]
    assert loaded["id"] == [f"row-{i}" for i in range(9)]
    assert sum(map(len, loaded["input_ids"])) == card["content"]["tokens"]
    assert loaded[:] == datasets.Dataset.from_list(_samples(tmp_path / "samples"), features=loaded.features)[:]


def test_nothing_to_learn_from_at_all_is_an_error_and_no_card(tmp_path: Path, tokenizer: Path):
    silent = {"messages": [{"role": "user", "content": "hi"}]}
    source = write_rows(tmp_path / "a.jsonl", [silent, b"{"])
    with pytest.raises(InputError, match="no assistant turn: 1, broken JSON: 1"):
        run(completions.settings(tmp_path, source, tokenizer))
    assert not (tmp_path / "samples" / "card.json").exists()


def test_inputs_that_cannot_be_read_say_so(tmp_path: Path, tokenizer: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \.jsonl"):
        run(completions.settings(tmp_path, tmp_path / "empty", tokenizer))
    (tmp_path / "empty" / "a.jsonl").touch()
    with pytest.raises(InputError, match="all 1 files are empty"):
        run(completions.settings(tmp_path, tmp_path / "empty", tokenizer))
    with pytest.raises(RecipeError, match="no such folder"):
        run(completions.settings(tmp_path, tmp_path / "nowhere", tokenizer))


def _generated(folder: Path, chat: Chat, rows: list[dict[str, Any]]) -> SetWriter:
    """A set as generate publishes it, its card left to the caller."""
    plan = Plan(room="generate", recipe={}, inputs=(), parts=(PlannedPart(name="part-00000", inputs=()),))
    writer = open_set_writer([str(folder)], plan)
    data = write_rows(folder / "rows", [with_engine_ids(chat, r, [60, 61, 2]) for r in rows]).read_bytes()
    record = PartRecord(
        name="part-00000",
        file="part-00000.jsonl",
        rows_in=len(rows),
        rows=len(rows),
        tokens=0,
        bytes=len(data),
        sha256=sha256_of(data),
        plan=plan.hash,
    )
    writer.publish(record, data)
    return writer


def test_a_generated_set_is_read_as_its_card_names_it(tmp_path: Path, tokenizer: Path):
    chat = open_chat(tokenizer)
    made = _generated(tmp_path / "in", chat, [row(i) for i in range(3)])
    write_rows(tmp_path / "in" / "stray.jsonl", [row(7)])
    with pytest.raises(StorageError, match=r"is unfinished.*no card\.json; run its draftmill generate"):
        run(completions.settings(tmp_path, tmp_path / "in", tokenizer))
    records = tuple(made.records().values())
    made.finish(make_card("generate", made.plan, records, {"tokenizer_hash": chat.tokenizer_hash}, {}))

    content = run(completions.settings(tmp_path, tmp_path / "in", tokenizer))["content"]

    assert content["input_plan"] == made.plan.hash
    assert [s["id"] for s in _samples(tmp_path / "samples")] == ["row-0", "row-1", "row-2"]
    assert [s["input_ids"][-3:] for s in _samples(tmp_path / "samples")] == [[60, 61, 2]] * 3
    other = write_tiny_tokenizer(tmp_path / "other", thinking=True)
    with pytest.raises(InputError, match="generated with another tokenizer"):
        run(completions.settings(tmp_path / "2", tmp_path / "in", other))


def test_the_gate_stops_a_part_before_it_is_published(tmp_path: Path, tokenizer: Path):
    good = [row(i) for i in range(30)]
    bad = [{**row(i), "id": f"bad-{i}", "messages": [{"role": "user", "content": f"{i}"}, EMPTY]} for i in range(30)]
    source = write_rows(tmp_path / "in" / "a.jsonl", good)
    write_rows(tmp_path / "in" / "b.jsonl", bad)
    part_bytes = shard_bytes(source.name, source.stat().st_size)
    chosen = completions.settings(tmp_path, source.parent, tokenizer, part_bytes=part_bytes)
    with pytest.raises(DataGateError, match=r"(?s)part-00001.*100\.0% of 30 samples have exactly 2 supervised tokens"):
        run(chosen)
    assert (tmp_path / "samples" / "part-00000.json").exists()
    assert not (tmp_path / "samples" / "part-00001.json").exists()
    with pytest.raises(DataGateError, match=r"(?s)gate of draftmill tokenize refused it.*part-00001.*exactly 2"):
        open_set(chosen.output[0], "tokenize")

    meant_so = completions.settings(
        tmp_path, source.parent, tokenizer, part_bytes=part_bytes, max_spike_frac=1, max_duplicate_frac=1
    )
    assert run(meant_so)["content"]["samples"] == 60
    assert open_set(chosen.output[0], "tokenize") and not (tmp_path / "samples" / "refused.json").exists()


EMPTY = {"role": "assistant", "content": "x"}


def test_a_set_that_the_gate_refused_can_be_looked_at_and_is_not_made_again(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
):
    bad = [{**row(i), "id": f"bad-{i}", "messages": [{"role": "user", "content": f"{i}"}, EMPTY]} for i in range(30)]
    chosen = completions.settings(tmp_path, write_rows(tmp_path / "b.jsonl", [*bad, b"{"]), tokenizer)
    with pytest.raises(DataGateError, match="exactly 2 supervised tokens"):
        run(chosen)
    shard = tmp_path / "samples" / "part-00000.arrow"
    made = shard.stat().st_mtime_ns
    capsys.readouterr()

    look = InspectSettings(input=chosen.output[0])
    seen = inspect(look)
    assert (seen["samples"], seen["finished"]) == (30, False) and "exactly 2 supervised tokens" in seen["refused"]
    told = capsys.readouterr().err
    assert "was refused by its gate: the gate refuses part-00000" in told and "1 of 31 rows dropped" in told
    assert inspect(look.model_copy(update={"row": 7, "tokenizer": str(tokenizer)}))["id"] == "bad-7"
    with pytest.raises(DataGateError, match=r"(?s)the gate refuses .*samples.*exactly 2 supervised"):
        inspect(look.model_copy(update={"gate": True}))

    with pytest.raises(DataGateError, match="exactly 2 supervised tokens"):
        run(chosen)
    assert run(chosen.model_copy(update={"max_spike_frac": 1.0}))["content"]["samples"] == 30
    assert shard.stat().st_mtime_ns == made
    seen = inspect(look)
    assert (seen["samples"], seen["finished"], seen["refused"]) == (30, True, None)


def test_a_rerun_that_ends_before_its_gate_leaves_a_set_that_is_unfinished_and_not_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [{**row(i), "messages": [{"role": "user", "content": f"{i}"}, EMPTY]} for i in range(30)]
    chosen = completions.settings(tmp_path, write_rows(tmp_path / "b.jsonl", rows), tokenizer)
    with pytest.raises(DataGateError):
        run(chosen)
    assert (tmp_path / "samples" / "refused.json").exists()
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "b.jsonl"))  # no folder: nothing can be spooled
    with pytest.raises(OSError, match=r"b\.jsonl"):
        run(chosen)
    assert not (tmp_path / "samples" / "refused.json").exists()


def test_another_recipe_may_take_the_place_of_a_set_that_was_refused_at_its_first_part(tmp_path: Path, tokenizer: Path):
    rows = [{**row(i), "messages": [{"role": "user", "content": f"{i}"}, EMPTY]} for i in range(30)]
    chosen = completions.settings(tmp_path, write_rows(tmp_path / "b.jsonl", rows), tokenizer)
    with pytest.raises(DataGateError):
        run(chosen)
    other = chosen.model_copy(update={"max_tokens": 24, "max_spike_frac": 1.0})
    card = run(other)
    assert card["content"]["recipe"]["max_tokens"] == 24
    assert {s["id"] for s in _samples(tmp_path / "samples")} == {f"row-{i}" for i in range(30)}


def test_a_set_that_is_merely_unfinished_is_looked_at_as_far_as_it_is_there(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
):
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(9)])
    chosen = completions.settings(tmp_path, source, tokenizer, part_bytes=400)
    whole = run(chosen)["content"]
    for name in ("card.json", "part-00001.json", "part-00001.rows", "part-00001.arrow"):
        (tmp_path / "samples" / name).unlink()
    seen = inspect(InspectSettings(input=chosen.output[0]))
    gone = whole["parts"][1]
    assert (seen["samples"], seen["tokens"]) == (9 - gone["rows"], whole["tokens"] - gone["tokens"])
    assert (seen["finished"], seen["refused"]) == (False, None)
    assert "is unfinished" in capsys.readouterr().err


def test_a_dry_run_tells_and_writes_nothing(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "in" / "a.jsonl", [row(i) for i in range(9)])
    told = run(completions.settings(tmp_path, source, tokenizer, part_bytes=400, dry_run=True))
    assert told["dry_run"] and told["left"][0] == "part-00000" and told["inputs"][0]["key"] == "a.jsonl"
    assert not (tmp_path / "samples").exists() and not told["done"]
    assert msgspec.json.encode(told)
    chosen = completions.settings(tmp_path, source, tokenizer, part_bytes=400)
    run(chosen)
    told = run(chosen.model_copy(update={"dry_run": True}))
    assert (told["left"], told["done"]) == ([], True)
    (tmp_path / "samples" / "state.json").unlink()
    assert not run(chosen.model_copy(update={"dry_run": True}))["done"]
    with pytest.raises(RecipeError, match="part_bytes was 400, is 500"):
        run(chosen.model_copy(update={"dry_run": True, "part_bytes": 500}))


def test_the_card_tells_what_is_in_the_set(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(9)])
    content = run(completions.settings(tmp_path, source, tokenizer, max_tokens=24))["content"]
    samples = _samples(tmp_path / "samples")
    supervised = [sum(s["loss_mask"]) for s in samples]
    assert content["samples"] == len(samples) == 9
    assert content["tokens"] == sum(len(s["input_ids"]) for s in samples)
    assert content["supervised_tokens"] == sum(supervised)
    assert content["supervised_per_sample"]["min"] == min(supervised)
    assert sum(b["samples"] for b in content["supervised_histogram"]) == 9
    assert content["length_per_sample"]["max"] == 24
    assert content["truncated_frac"] == round(sum(s["truncated"] for s in samples) / 9, 4) > 0
    assert content["borders"]["end"] == "<|im_end|>"
    assert json.loads((tmp_path / "samples" / "card.json").read_bytes())["content"] == content


def test_the_card_tells_of_answers_that_are_history_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_tiny_tokenizer(tmp_path / "thinking", thinking=True)
    talks = [{"id": f"{n}", "messages": [*row(n)["messages"], *row(n + 1)["messages"]]} for n in range(4)]
    source = write_rows(tmp_path / "a.jsonl", [*talks, row(9)])
    told = {}
    for turns in ("faithful", "expand"):
        content = run(completions.settings(tmp_path / turns, source, folder, turns=turns))["content"]
        told[turns] = [content[f"answers{ending}"] for ending in ("", "_unsupervised", "_unsupervised_frac")]
        shown = capsys.readouterr().err
        assert ("4 of 9 answers are history alone" in shown) == ("--turns expand" in shown) == (turns == "faithful")
    assert told == {"faithful": [9, 4, 0.4444], "expand": [9, 0, 0.0]}
    seen = inspect(InspectSettings(input=str(tmp_path / "faithful" / "samples")))
    assert (seen["answers"], seen["answers_unsupervised"]) == (9, 4) and "--turns expand" in capsys.readouterr().err


def test_template_keywords_reach_the_prompt_and_unknown_ones_are_refused(tmp_path: Path):
    folder = write_tiny_tokenizer(tmp_path / "thinking", thinking=True)
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(3)])
    run(completions.settings(tmp_path, source, folder, template_kwargs={"enable_thinking": False}))
    chat, samples = open_chat(folder), _samples(tmp_path / "samples")
    assert "<think>\n\n</think>\n\nred green" in chat.decode(samples[0]["input_ids"])
    assert (
        chat.decode([i for i, own in zip(samples[0]["input_ids"], samples[0]["loss_mask"], strict=True) if own])[0]
        == "r"
    )
    with pytest.raises(RecipeError, match="unknown key 'enable_thinkng'; did you mean 'enable_thinking'"):
        run(completions.settings(tmp_path / "2", source, folder, template_kwargs={"enable_thinkng": False}))


def test_a_template_that_prints_the_day_needs_to_be_told_it(tmp_path: Path, tokenizer: Path):
    (tokenizer / "chat_template.jinja").write_text("Today: {{ strftime_now('%d %b %Y') }}\n" + PLAIN_TEMPLATE)
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(3)])
    with pytest.raises(RecipeError, match=r"prints the day.*--template-date"):
        run(completions.settings(tmp_path, source, tokenizer))
    card = run(completions.settings(tmp_path, source, tokenizer, template_date="2025-01-02"))
    text = open_chat(tokenizer).decode(_samples(tmp_path / "samples")[0]["input_ids"])
    assert text.startswith("Today: 02 Jan 2025\n") and card["content"]["recipe"]["template_date"] == "2025-01-02"


def test_what_lies_beside_a_finished_set_is_restored(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(6)])
    settings = completions.settings(tmp_path, source, tokenizer)
    card, folder = run(settings), tmp_path / "samples"
    for name in ("state.json", "dataset_info.json", "tokenize.svg", "part-00000.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        assert run(settings) == card
        assert (folder / name).read_bytes() == kept


def test_the_gate_tells_why_rows_were_dropped_and_where_the_first_one_stands(tmp_path: Path, tokenizer: Path):
    source = write_rows(tmp_path / "a.jsonl", [*(row(i) for i in range(20)), *[b"{"] * 20])
    with pytest.raises(DataGateError, match=r"broken JSON: 20, the first in a\.jsonl line 21"):
        run(completions.settings(tmp_path, source, tokenizer))
