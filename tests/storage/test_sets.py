"""Promise: a set is what its plan, records and card say; parts are whole or absent, and a cut part is noticed."""

from pathlib import Path

import pytest

from draftmill.contracts.cards import Card, InputFile, PartRecord, Plan, PlannedPart, make_card
from draftmill.contracts.errors import DataGateError, RecipeError, StorageError
from draftmill.storage.sets import SetWriter, look_at, open_set, open_set_writer
from draftmill.storage.store import sha256_of

PLAN = Plan(
    room="generate",
    recipe={"max_new_tokens": 64},
    inputs=(InputFile(key="prompts.jsonl", size=10, identity="sha256:ab"),),
    parts=(PlannedPart(name="part-00000", inputs=("a",)), PlannedPart(name="part-00001", inputs=("b",))),
)


def record(index: int, data: bytes) -> PartRecord:
    name = f"part-{index:05d}"
    return PartRecord(
        name=name,
        file=f"{name}.jsonl",
        rows_in=1,
        rows=1,
        tokens=3,
        bytes=len(data),
        sha256=sha256_of(data),
        plan=PLAN.hash,
    )


def finish(writer: SetWriter) -> Card:
    records = tuple(writer.records()[part.name] for part in PLAN.parts)
    return writer.finish(make_card("generate", PLAN, records, {}, {"host": "h"}))


def test_an_interrupted_set_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    urls = [str(tmp_path / "one"), str(tmp_path / "two")]
    writer = open_set_writer(urls, PLAN)
    writer.publish(record(0, b"a\n"), b"a\n")
    (tmp_path / "two" / "part-00000.json").unlink()  # killed between the two stores

    again = open_set_writer(urls, PLAN)
    assert [part.name for part in again.missing()] == ["part-00000", "part-00001"]
    assert again.card() is None
    for index, data in enumerate((b"a\n", b"b\n")):
        again.publish(record(index, data), data)
    card = finish(again)
    assert card.content["rows"] == 2 and card.content["tokens"] == 6
    assert open_set_writer(urls, PLAN).card() == card
    for url in urls:
        reader = open_set(url, "generate")
        assert [reader.local(file).read_bytes() for file in reader.inputs] == [b"a\n", b"b\n"]


def test_another_set_in_the_same_folder_is_refused_with_what_differs(tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    writer.publish(record(0, b"a\n"), b"a\n")
    other = Plan(room="generate", recipe={"max_new_tokens": 96}, inputs=PLAN.inputs, parts=PLAN.parts)
    with pytest.raises(RecipeError, match="max_new_tokens was 64, is 96"):
        open_set_writer([str(tmp_path)], other)


def test_a_plan_of_which_nothing_was_made_gives_way(tmp_path: Path) -> None:
    open_set_writer([str(tmp_path)], PLAN)
    other = Plan(room="generate", recipe={"max_new_tokens": 96}, inputs=PLAN.inputs, parts=PLAN.parts)
    assert open_set_writer([str(tmp_path)], other).missing() == list(other.parts)
    with pytest.raises(StorageError, match="is unfinished"):
        open_set(str(tmp_path), "generate")


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_finished_set_with_a_harmed_part_is_made_whole_again(harm: str, tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    for index, data in enumerate((b"a\n", b"b\n")):
        writer.publish(record(index, data), data)
    finish(writer)
    part = tmp_path / "part-00001.jsonl"
    part.unlink() if harm == "gone" else part.write_bytes(b"b")

    again = open_set_writer([str(tmp_path)], PLAN)
    assert again.card() is None
    assert [missing.name for missing in again.missing()] == ["part-00001"]
    again.publish(record(1, b"b\n"), b"b\n")
    assert again.card() is not None


def test_a_card_hashes_its_content_and_never_its_run() -> None:
    records = (record(0, b"a\n"), record(1, b"b\n"))
    one, two = (make_card("generate", PLAN, records, {}, {"host": host}) for host in ("x", "y"))
    assert one.content_hash == two.content_hash and one.run != two.run


def test_a_cut_part_is_named(tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    for index, data in enumerate((b"a\n", b"b\n")):
        writer.publish(record(index, data), data)
    finish(writer)
    (tmp_path / "part-00001.jsonl").write_bytes(b"b")
    reader = open_set(str(tmp_path), "generate")
    assert reader.local(reader.inputs[0]).read_bytes() == b"a\n"
    with pytest.raises(StorageError, match=r"part-00001.jsonl is not what its card says \(1 of 2 bytes"):
        reader.local(reader.inputs[1])


def test_an_unfinished_foreign_or_missing_set_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such folder"):
        open_set(str(tmp_path / "typo"), "generate")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"holds no plan\.json"):
        open_set(str(tmp_path / "empty"), "generate")
    open_set_writer([str(tmp_path / "open")], PLAN)
    with pytest.raises(StorageError, match="is unfinished"):
        open_set(str(tmp_path / "open"), "generate")
    with pytest.raises(StorageError, match="made by draftmill generate"):
        open_set(str(tmp_path / "open"), "tokenize")


def refuse(writer: SetWriter, reason: str = "too few", shard: str | None = None) -> None:
    with pytest.raises(DataGateError, match=reason), writer.telling_refusal(shard):
        raise DataGateError(reason)


def test_a_set_that_its_gate_refused_says_so_until_it_is_asked_again_or_finished(tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    writer.publish(record(0, b"a\n"), b"a\n")
    refuse(writer)
    with pytest.raises(
        DataGateError, match="is unfinished, because the gate of draftmill generate refused it: too few"
    ):
        open_set(str(tmp_path), "generate")
    refusal = tmp_path / "refused.json"
    told = refusal.read_bytes()
    for harmed in (b"{", b"[]", told.replace(PLAN.hash.encode(), b"0" * 64)):  # damaged, or of another plan
        refusal.write_bytes(harmed)
        with pytest.raises(StorageError, match="is unfinished: it has a plan but no card"):
            open_set(str(tmp_path), "generate")
    writer.forget_refusal()
    assert not refusal.exists()
    refuse(writer)
    writer.publish(record(1, b"b\n"), b"b\n")
    finish(writer)
    assert not refusal.exists() and open_set(str(tmp_path), "generate")


def test_one_of_several_runs_takes_back_what_its_own_gate_refused_and_no_more(tmp_path: Path) -> None:
    writer, refusal = open_set_writer([str(tmp_path)], PLAN), tmp_path / "refused.json"
    for told_by, forgotten_by in (("1/2", "1/2"), ("1/2", None), (None, None)):
        refuse(writer, shard=told_by)
        writer.forget_refusal("2/2")
        assert refusal.exists()
        writer.forget_refusal(forgotten_by)
        assert not refusal.exists()


def test_a_set_whose_first_part_was_refused_gives_way_to_another_plan(tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    other = Plan(room="generate", recipe={"max_new_tokens": 96}, inputs=PLAN.inputs, parts=PLAN.parts)
    (tmp_path / "part-00000.jsonl").write_bytes(b"looked at, and not let pass")
    with pytest.raises(RecipeError, match="max_new_tokens was 64, is 96"):
        open_set_writer([str(tmp_path)], other)
    refuse(writer)
    with pytest.raises(RecipeError, match="already holds another generate set: it was made by generate"):
        open_set_writer([str(tmp_path)], Plan(room="train", recipe={}, inputs=PLAN.inputs, parts=()))
    assert open_set_writer([str(tmp_path)], other).missing() == list(other.parts)
    writer = open_set_writer([str(tmp_path)], PLAN)
    writer.publish(record(0, b"a\n"), b"a\n")
    with pytest.raises(RecipeError, match="max_new_tokens was 64, is 96"):
        open_set_writer([str(tmp_path)], other)


def test_what_is_missing_is_told_without_writing(tmp_path: Path) -> None:
    url, absent = str(tmp_path / "set"), str(tmp_path / "absent")
    assert look_at([url], PLAN).left == PLAN.parts
    assert not Path(url).exists()
    writer = open_set_writer([url], PLAN)
    writer.publish(record(0, b"a\n"), b"a\n")
    standing = look_at([url], PLAN)
    assert [part.name for part in standing.left] == ["part-00001"]
    assert (standing.is_done, standing.words) == (False, "1 of 2 parts are left to make")
    writer.publish(record(1, b"b\n"), b"b\n")
    assert (look_at([url], PLAN).left, look_at([url], PLAN).is_done) == ((), False)
    finish(writer)
    assert (look_at([url], PLAN).is_done, look_at([url], PLAN).words) == (True, "done")
    assert not look_at([url], PLAN, "what a room keeps beside").is_done
    assert not look_at([url, absent], PLAN).is_done and not Path(absent).exists()


def test_what_a_writer_would_refuse_is_refused_without_writing(tmp_path: Path) -> None:
    url, absent, file = (str(tmp_path / name) for name in ("set", "absent", "file"))
    open_set_writer([url], PLAN).publish(record(0, b"a\n"), b"a\n")
    other = Plan(room="generate", recipe={"max_new_tokens": 96}, inputs=PLAN.inputs, parts=PLAN.parts)
    for urls in ([url], [absent, url]):
        with pytest.raises(RecipeError, match="max_new_tokens was 64, is 96"):
            look_at(urls, other)
    Path(file).touch()
    for wrong, says in ((file, "is a file; a folder is wanted"), ("foo://bar", "a URL is a local path")):
        with pytest.raises(RecipeError, match=says):
            look_at([wrong], PLAN)
    assert not Path(absent).exists()


def test_a_garbled_plan_is_no_plan_of_ours(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"room": 1}')
    with pytest.raises(StorageError, match=r"plan\.json is not a plan of draftmill"):
        open_set_writer([str(tmp_path)], PLAN)


def test_a_part_that_somebody_took_away_is_named(tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    for number in range(2):
        writer.publish(record(number, b"a\n"), b"a\n")
    assert [found.name for found in writer.all_records()] == ["part-00000", "part-00001"]
    (tmp_path / writer.all_records()[1].file).unlink()
    with pytest.raises(StorageError, match=r"part-00001.* run the same command again"):
        writer.all_records()


@pytest.mark.parametrize("name", ["part-00000.json", "card.json"])
def test_a_garbled_record_or_card_costs_no_more_than_itself(name: str, tmp_path: Path) -> None:
    writer = open_set_writer([str(tmp_path)], PLAN)
    writer.publish(record(0, b"a\n"), b"a\n")
    (tmp_path / name).write_text("{")
    with pytest.raises(StorageError, match=r"remove this file and run the same command again"):
        writer.records(), writer.card()
    (tmp_path / name).unlink()
    assert writer.card() is None and writer.records().keys() == ({"part-00000"} if name == "card.json" else set())
