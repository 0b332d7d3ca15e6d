"""A rerun goes on from the newest checkpoint of its plan whole anywhere, gives it to every store, prunes."""

import platform
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.errors import StorageError  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.storage.checkpoints import find_marker, put_checkpoint, remove_checkpoints, step_folder, steps_on  # noqa: E402
from draftmill.storage.patience import Patiently  # noqa: E402
from draftmill.storage.store import Store, open_store  # noqa: E402
from draftmill.train.interruption import Stop, StoppedError  # noqa: E402
from draftmill.train.keep import Checkpoints  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402
from storage.far_store import FarStore  # noqa: E402
from storage.unruly_proxy import GONE, WELL_BEHAVED, UnrulyProxy  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS = TrainSettings(input="in", output=("out",), target="t")
SHAPE = DrafterShape(
    hidden_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    vocab_size=10,
    block_size=4,
    tap_ids=(0,),
    mask_id=9,
    num_target_layers=4,
    layer_types=("full_attention",),
)


# Larger than any process's number may be.
NOBODY = 1 << 23


def fresh() -> RunState:
    return new_run(Drafter(SHAPE), SETTINGS)


def saved_until(checkpoints: Checkpoints, last_step: int) -> RunState:
    """A run whose weights hold its step, saved whenever that is due."""
    run = fresh()
    for step in range(last_step + 1):
        run.position.step = step
        if checkpoints.is_due(step):
            torch.nn.init.constant_(run.drafter.fc.weight, step)
            checkpoints.save(run, b"log until %d" % step)
    checkpoints.behind.settle()
    return run


def both(tmp_path: Path, plan: str = "plan") -> Checkpoints:
    stores = tuple(open_store(str(tmp_path / name), create=True) for name in ("a", "b"))
    return Checkpoints(stores, plan, num_steps=25, save_every=5, keep=2, patiently=Patiently(0))


def resumed_step(checkpoints: Checkpoints) -> int | None:
    run = fresh()
    if not checkpoints.resume(run):
        return None
    assert run.drafter.fc.weight.eq(run.position.step).all()
    return run.position.step


def test_the_newest_checkpoint_is_taken_and_the_others_pruned(tmp_path: Path) -> None:
    checkpoints = both(tmp_path)
    assert resumed_step(checkpoints) is None
    saved_until(checkpoints, 17)
    assert steps_on(checkpoints.stores[0]) == [0, 10, 15]
    assert resumed_step(checkpoints) == 15


def test_the_newest_due_are_kept_however_long_the_run_is(tmp_path: Path) -> None:
    for num_steps in (24, 25, 26):
        checkpoints = replace(both(tmp_path), num_steps=num_steps)
        for step in range(num_steps + 1):
            due = [s for s in range(step + 1) if checkpoints.is_due(s)]
            assert checkpoints.kept(step) == {0, *due[-2:], step}
    long = replace(both(tmp_path), num_steps=10**12, save_every=7)
    assert long.kept(10**11) == {0, 10**11, *(10**11 // 7 * 7 - ago for ago in (0, 7))}


@pytest.mark.parametrize("file", ["checkpoint.json", "model.safetensors", "optimizer.safetensors"])
def test_what_one_store_lacks_it_is_given_by_the_other(tmp_path: Path, file: str) -> None:
    checkpoints = both(tmp_path)
    saved_until(checkpoints, 17)
    whole = contents(checkpoints.stores[0])
    (tmp_path / "b" / step_folder(15) / file).write_bytes(b"cut")
    assert resumed_step(checkpoints) == 15
    assert [contents(store) for store in checkpoints.stores] == [whole, whole]


@pytest.mark.parametrize("file", ["checkpoint.json", "model.safetensors", "optimizer.safetensors"])
def test_what_no_store_holds_whole_is_not_gone_on_from(tmp_path: Path, file: str) -> None:
    checkpoints = both(tmp_path)
    saved_until(checkpoints, 17)
    for name in ("a", "b"):
        changed = tmp_path / name / step_folder(15) / file
        changed.write_bytes(changed.read_bytes()[::-1])  # as long as before: only its hash differs
    assert resumed_step(checkpoints) == 10
    assert [steps_on(store) for store in checkpoints.stores] == [[0, 10], [0, 10]]


def test_a_run_that_is_stopped_goes_on_from_there(tmp_path: Path) -> None:
    checkpoints = both(tmp_path)
    run = saved_until(checkpoints, 17)
    leave(checkpoints, run, 17)
    assert [steps_on(store) for store in checkpoints.stores] == [[0, 10, 15, 17], [0, 10, 15]]
    assert resumed_step(checkpoints) == 17
    assert [steps_on(store) for store in checkpoints.stores] == [[0, 10, 15, 17]] * 2
    saved_until(checkpoints, 20)
    assert [steps_on(store) for store in checkpoints.stores] == [[0, 15, 20]] * 2


def test_a_run_without_a_local_output_leaves_it_in_the_cache_and_the_store_gets_it(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    checkpoints = Checkpoints((open_store(s3_url),), "plan", num_steps=25, save_every=5, keep=2, patiently=Patiently(0))
    run = saved_until(checkpoints, 7)
    leave(checkpoints, run, 7)
    assert steps_on(checkpoints.stores[0]) == [0, 5]
    assert resumed_step(checkpoints) == 7
    assert steps_on(checkpoints.stores[0]) == [0, 5, 7]
    assert checkpoints.stores[0].get("metrics.jsonl") == b"log until 7"
    assert not list((tmp_path / "cache" / "stopped").iterdir())


def test_nothing_goes_for_a_checkpoint_of_a_run_that_may_be_diverging(tmp_path: Path) -> None:
    checkpoints = both(tmp_path)
    run = saved_until(checkpoints, 10)
    for step, bad_in_a_row, kept in ((15, 2, [0, 5, 10, 15]), (20, 5, [0, 5, 10, 15, 20]), (25, 0, [0, 20, 25])):
        run.position.step, run.position.bad_in_a_row = step, bad_in_a_row
        torch.nn.init.constant_(run.drafter.fc.weight, step)
        checkpoints.save(run, b"")
        checkpoints.behind.settle()
        assert resumed_step(checkpoints) == step
        assert [steps_on(store) for store in checkpoints.stores] == [kept] * 2


def test_what_a_killed_process_left_half_written_is_swept(tmp_path: Path) -> None:
    checkpoints = both(tmp_path)
    saved_until(checkpoints, 17)
    whole = sorted((tmp_path / "a").rglob("*"))
    draft = f"checkpoint.json.tmp-{platform.node()}-{NOBODY}"
    for step in (15, 20):
        (tmp_path / "a" / step_folder(step)).mkdir(exist_ok=True)
        (tmp_path / "a" / step_folder(step) / draft).write_bytes(b"{")
    assert resumed_step(checkpoints) == 15
    assert sorted((tmp_path / "a").rglob("*")) == whole


def test_a_run_that_is_stopped_while_its_checkpoint_is_being_written_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, run = both(tmp_path), fresh()
    for step in range(5, 26, 5):
        run.position.step = step
        checkpoints.save(run, b"")
        checkpoints.leave(run, b"")  # both threads are at the same files
        checkpoints.behind.settle()
        assert resumed_step_alone(checkpoints) == step
    assert "could not be kept" not in caplog.text


def resumed_step_alone(checkpoints: Checkpoints) -> int:
    """The step a rerun goes on from."""
    run = fresh()
    assert checkpoints.resume(run)
    return run.position.step


def leave(checkpoints: Checkpoints, run: RunState, step: int) -> None:
    """Has a run that stands at `step` stopped."""
    run.position.step = step
    torch.nn.init.constant_(run.drafter.fc.weight, step)
    checkpoints.leave(run, b"log until %d" % step)


def contents(store: Store) -> dict[str, bytes]:
    """Every file of a store."""
    return {file.key: store.get(file.key) for file in store.files()}


def test_a_store_that_is_gone_for_a_while_is_waited_for_while_training_goes_on(
    tmp_path: Path, lake: UnrulyProxy
) -> None:
    checkpoints = Checkpoints(
        (open_store(lake.url),), "plan", num_steps=25, save_every=5, keep=2, patiently=Patiently(60)
    )
    run = saved_until(checkpoints, 4)
    run.position.step = 5
    lake.faults = GONE
    checkpoints.save(run, b"log until 5")
    run.position.step = 6  # nobody waited
    checkpoints.behind.check()
    time.sleep(2)
    lake.faults = WELL_BEHAVED
    checkpoints.behind.settle()
    assert steps_on(checkpoints.stores[0]) == [0, 5] and lake.fates["drop"] > 3
    assert checkpoints.stores[0].get("metrics.jsonl") == b"log until 5"


def test_a_full_disk_is_told_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    checkpoints = both(tmp_path)
    run = saved_until(checkpoints, 5)
    run.position.step = 10
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    try:
        checkpoints.save(run, b"")
        with pytest.raises(StorageError, match="cannot be written: File too large; free some space"):
            checkpoints.behind.settle()
        checkpoints.leave(run, b"")  # tells, and lets the run end as it was told to
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert resumed_step(checkpoints) == 5


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("position.json", b"{}"),
        ("position.json", b'{"step":10}'),
        ("position.json", b'{"step":15,"num_updates":15}'),  # without their moments
        ("model.safetensors", b"no tensors"),
        (
            "model.safetensors",
            new_run(Drafter(replace(SHAPE, intermediate_size=8)), SETTINGS).files()["model.safetensors"],
        ),
        ("optimizer.safetensors", None),
    ],
)
def test_a_checkpoint_whose_files_do_not_belong_together_is_as_good_as_damaged(
    tmp_path: Path, file: str, data: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = both(tmp_path)
    run = saved_until(checkpoints, 15)
    files = {name: found for name, found in {**run.files(), file: data}.items() if found is not None}
    put_checkpoint(checkpoints.stores, 15, "plan", files)
    assert resumed_step(checkpoints) == 10
    assert f"checkpoint of step 15: {file}" in caplog.text or "optimizer.safetensors does not fit" in caplog.text


def test_where_no_checkpoint_will_do_the_run_starts_with_its_own_weights(tmp_path: Path) -> None:
    checkpoints, run = both(tmp_path), fresh()
    before = {name: t.clone() for name, t in run.drafter.state_dict().items()}
    put_checkpoint(checkpoints.stores, 5, "plan", {**fresh().files(), "optimizer.safetensors": b"cut"})
    assert not checkpoints.resume(run)
    assert all(torch.equal(before[name], t) for name, t in run.drafter.state_dict().items())


def test_checkpoints_of_another_plan_are_passed_over(tmp_path: Path) -> None:
    saved_until(both(tmp_path), 17)
    assert resumed_step(both(tmp_path, plan="another")) is None


def test_the_last_step_is_saved_even_between_two_that_are_due(tmp_path: Path) -> None:
    checkpoints = Checkpoints(both(tmp_path).stores, "plan", num_steps=13, save_every=5, keep=1, patiently=Patiently(0))
    saved_until(checkpoints, 13)
    assert [marker.step for marker in checkpoints.markers()] == [0, 13]
    remove_checkpoints(checkpoints.stores[0], [0])
    assert [marker.step for marker in checkpoints.markers()] == [13]
    put_checkpoint(checkpoints.stores, 13, "another", {})
    with pytest.raises(StorageError, match="last checkpoint was removed"):
        checkpoints.markers()
    assert find_marker(checkpoints.stores[1], 5) is None


def far_away(far: FarStore, patiently: Patiently) -> Checkpoints:
    return Checkpoints((far,), "plan", num_steps=25, save_every=5, keep=2, patiently=patiently)


def stand_at(run: RunState, step: int) -> RunState:
    """The run, its weights holding its step."""
    run.position.step = step
    torch.nn.init.constant_(run.drafter.fc.weight, step)
    return run


def test_training_goes_on_while_a_store_is_gone_for_five_minutes_which_then_gets_what_stood_when_it_was_due() -> None:
    far, has_gone_on = FarStore(), threading.Event()

    def sleep(seconds: float) -> None:
        assert has_gone_on.wait(60)
        far.line.clock.sleep(seconds)

    checkpoints = far_away(far, Patiently(600, far.line.clock, sleep))
    run = saved_until(checkpoints, 4)
    far.line.cut(300)
    checkpoints.save(stand_at(run, 5), b"log until 5")
    stand_at(run, 6)  # nobody waited
    checkpoints.behind.check()
    has_gone_on.set()
    checkpoints.behind.settle()
    assert far.line.clock.now >= 300
    assert steps_on(far) == [0, 5] and far.get("metrics.jsonl") == b"log until 5"
    assert resumed_step(checkpoints) == 5


def test_a_run_that_waits_for_its_store_can_be_stopped_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    far, is_over = FarStore(), threading.Event()

    def sleep(_seconds: float) -> None:
        assert is_over.wait(20), "nobody stops waiting"

    checkpoints = far_away(far, Patiently(600, far.line.clock, sleep))
    run = saved_until(checkpoints, 4)
    far.line.cut(300)
    checkpoints.save(stand_at(run, 5), b"log until 5")
    stop = Stop()
    stop.is_asked, checkpoints.behind.heed = True, stop.check
    with pytest.raises(StoppedError):
        checkpoints.save(stand_at(run, 10), b"log until 10")
    checkpoints.leave(run, b"log until 10")
    far.line.cut(0)
    assert resumed_step(far_away(far, Patiently(0))) == 10
    is_over.set()
