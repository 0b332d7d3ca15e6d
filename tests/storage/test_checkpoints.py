"""A checkpoint is what its marker says: whole, of that step, found newest first; on local disks and object stores."""

import shutil
from pathlib import Path

import pytest

from draftmill.contracts.cards import Plan, make_card
from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.checkpoints import (
    MARKER_FILE,
    find_checkpoint,
    find_marker,
    put_checkpoint,
    read_checkpoint,
    refuse_blocked,
    remove_checkpoints,
    step_folder,
    steps_on,
    sweep_checkpoints,
)
from draftmill.storage.sets import open_set_writer
from draftmill.storage.store import Store, open_store

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "optimizer.safetensors": b"moments"}


def run_with(url: str, *steps: int) -> Store:
    store = open_store(url, create=True)
    for step in steps:
        put_checkpoint((store,), step, "plan", {**FILES, "position.json": str(step).encode()})
    return store


def test_the_newest_whole_checkpoint_is_found_and_a_foreign_folder_is_not(tmp_path: Path) -> None:
    run_with(str(tmp_path), 0, 100, 200)
    (tmp_path / step_folder(200) / MARKER_FILE).unlink()  # cut short
    foreign = tmp_path / step_folder(300)
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    other = tmp_path / step_folder(400)
    other.mkdir()
    (other / MARKER_FILE).write_text('{"of": "somebody else"}')
    shutil.copytree(tmp_path / step_folder(100), tmp_path / step_folder(500))  # says it is step 100
    assert find_checkpoint(str(tmp_path)) == tmp_path / step_folder(100)
    assert find_checkpoint(str(tmp_path), step=0) == tmp_path / step_folder(0)
    with pytest.raises(InputError, match=r"no complete checkpoint of step 200 .*0, 100, 200, 300, 400, 500"):
        find_checkpoint(str(tmp_path), step=200)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "position.json"])
def test_a_file_that_changed_behind_its_marker_is_named(tmp_path: Path, name: str) -> None:
    store = run_with(str(tmp_path), 5)
    (tmp_path / step_folder(5) / name).write_bytes(b"other")
    with pytest.raises(StorageError, match=f"{name} is missing, cut or changed"):
        find_checkpoint(str(tmp_path))
    marker = find_marker(store, 5)
    assert marker is not None and read_checkpoint(store, marker) is None


def test_a_url_may_be_a_checkpoint_or_an_exported_folder(tmp_path: Path) -> None:
    run_with(str(tmp_path / "run"), 7)
    checkpoint = tmp_path / "run" / step_folder(7)
    assert find_checkpoint(str(checkpoint)) == checkpoint
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        find_checkpoint(str(exported))
    (exported / "model.safetensors").write_bytes(b"weights")
    assert find_checkpoint(str(exported)) == exported


def test_a_folder_without_checkpoints_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"steps there: none.*draftmill train"):
        find_checkpoint(str(tmp_path))


def test_a_broken_marker_of_a_folder_named_directly_is_told(tmp_path: Path) -> None:
    run_with(str(tmp_path), 5)
    (tmp_path / step_folder(5) / MARKER_FILE).write_text('{"step"')
    with pytest.raises(InputError, match="no marker of a checkpoint"):
        find_checkpoint(str(tmp_path / step_folder(5)))


def test_a_checkpoint_of_another_plan_is_not_the_runs(tmp_path: Path) -> None:
    plan = Plan(room="train", recipe={}, inputs=(), parts=())
    store = open_set_writer([str(tmp_path)], plan).stores[0]
    put_checkpoint((store,), 5, plan.hash, FILES)
    put_checkpoint((store,), 9, "another", FILES)
    assert find_checkpoint(str(tmp_path)) == tmp_path / step_folder(5)
    with pytest.raises(InputError, match="no complete checkpoint of step 9"):
        find_checkpoint(str(tmp_path), 9)


def test_a_finished_run_is_not_taken_at_an_older_step_than_its_card_says(tmp_path: Path) -> None:
    plan = Plan(room="train", recipe={}, inputs=(), parts=())
    writer = open_set_writer([str(tmp_path)], plan)
    for step in (5, 9):
        put_checkpoint(writer.stores, step, plan.hash, FILES)
    writer.finish(make_card("train", plan, (), {"num_steps": 9}, {}))
    assert find_checkpoint(str(tmp_path)) == tmp_path / step_folder(9)
    remove_checkpoints(writer.stores[0], [9])
    with pytest.raises(StorageError, match=r"step 9, with which the run ended.*checkpoints/step-00000005"):
        find_checkpoint(str(tmp_path))
    assert find_checkpoint(str(tmp_path / step_folder(5))) == tmp_path / step_folder(5)


def test_what_is_no_checkpoint_among_them_is_left_alone(tmp_path: Path) -> None:
    store = run_with(str(tmp_path), 5)
    place = tmp_path / "checkpoints"
    (place / ".DS_Store").write_bytes(b"")
    (place / "step-00000007").write_bytes(b"")
    (place / "link").symlink_to(tmp_path / "nowhere")
    (place / "step-00000009").mkdir()
    sweep_checkpoints(store)
    assert {path.name for path in place.iterdir()} == {".DS_Store", "step-00000005", "step-00000007", "link"}
    assert find_checkpoint(str(tmp_path)) == tmp_path / step_folder(5)
    assert steps_on(store) == [5]
    remove_checkpoints(store, [5])
    assert not (place / "step-00000005").exists() and (place / "link").is_symlink()


@pytest.mark.parametrize("what", ["a link to nothing", "no folder"])
def test_what_stands_in_a_checkpoints_place_is_named_before_any_is_written(tmp_path: Path, what: str) -> None:
    store = run_with(str(tmp_path), 5)
    (tmp_path / "checkpoints" / ".DS_Store").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / step_folder(6)).symlink_to(tmp_path / "elsewhere")
    refuse_blocked(store)
    refuse_blocked(run_with(str(tmp_path / "new")))
    place = tmp_path / step_folder(7)
    place.symlink_to("nowhere") if what == "a link to nothing" else place.touch()
    with pytest.raises(StorageError, match=f"step-00000007 is {what}.*remove or rename it"):
        refuse_blocked(store)


def test_removed_checkpoints_are_gone_and_the_others_stand(tmp_path: Path) -> None:
    store = run_with(str(tmp_path), 0, 100, 200)
    remove_checkpoints(store, [100])
    assert steps_on(store) == [0, 200]
    assert find_checkpoint(str(tmp_path), step=0).is_dir()


def test_checkpoints_on_an_object_store_are_fetched_once_without_optimizer_state(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path))
    store = run_with(s3_url, 0, 100)
    folder = find_checkpoint(s3_url)
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", "position.json"}
    assert (folder / "position.json").read_bytes() == b"100"
    marker = find_marker(store, 100)
    assert marker is not None and read_checkpoint(store, marker) == {**FILES, "position.json": b"100"}
    store.delete([f"{step_folder(100)}/model.safetensors"])
    assert find_checkpoint(s3_url, 100) == folder
    remove_checkpoints(store, [0, 100])
    assert steps_on(store) == []
