"""A run that was stopped at any moment goes on and ends in the same bytes; a finished one gives its card at once."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from draftmill.chat.chat import open_chat  # noqa: E402
from draftmill.contracts.errors import RecipeError, StorageError  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.storage.checkpoints import MARKER_FILE, find_checkpoint, step_folder, steps_on  # noqa: E402
from draftmill.storage.lock import sole_writer  # noqa: E402
from draftmill.storage.store import open_store  # noqa: E402
from draftmill.train.run import run  # noqa: E402
from sample_sets import GivenSample, write_samples  # noqa: E402
from small_run import small_settings, train_command  # noqa: E402
from tiny import write_tiny_target  # noqa: E402

pytestmark = pytest.mark.torch

NUM_STEPS = 14
SAMPLES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a tokenized set for it, in one folder."""
    place = tmp_path_factory.mktemp("train")
    write_tiny_target(place / "target", num_layers=4, hidden_size=32)
    rng = np.random.default_rng(0)
    given: list[GivenSample] = [
        (f"s{i}", rng.integers(0, 256, n).tolist(), [t >= 5 for t in range(n)])
        for i, n in enumerate(rng.integers(15, 40, SAMPLES).tolist())
    ]
    given.append(("no anchor", [1, 2, 3], [False, False, True]))
    write_samples(place / "samples", given, open_chat(place / "target").tokenizer_hash)
    return place


def settings(folder: Path, *output: Path | str, **changed: object) -> TrainSettings:
    own: dict[str, object] = {"num_layers": 2, "max_tokens": 80, "num_anchors": 12, "rows_per_step": 2, "save_every": 4}
    return small_settings(folder, *output, **{**own, "num_steps": NUM_STEPS, **changed})


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    run(settings(folder, folder / "undisturbed"))
    return folder / "undisturbed"


def checkpoint_bytes(output: Path) -> dict[str, bytes]:
    """Every file of every checkpoint."""
    root = output / "checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl without what the clock says."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith(("_frac", "_s", "_bytes"))} for line in lines]


def test_the_checkpoints_kept_are_step_0_and_the_newest(undisturbed: Path) -> None:
    kept = sorted(p.name for p in (undisturbed / "checkpoints").iterdir())
    assert kept == ["step-00000000", "step-00000012", "step-00000014"]
    assert find_checkpoint(str(undisturbed)) == undisturbed / step_folder(NUM_STEPS)
    assert [line["step"] for line in metrics(undisturbed)] == list(range(1, NUM_STEPS + 1))
    assert metrics(undisturbed)[-1]["loss"] < metrics(undisturbed)[0]["loss"]
    told = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[-1])
    assert told["time_left_s"] == 0 and told["peak_memory_bytes"] > 1 << 20 and told["tokens_per_s"] > 0
    shares = [told[f"{phase}_frac"] for phase in ("target", "drafter", "optimizer", "waiting")]
    assert 0 < sum(shares) < 1.01, "what is left is packing, and what followed the step before"


def test_a_run_put_back_to_any_checkpoint_ends_in_the_same_bytes(folder: Path, undisturbed: Path) -> None:
    expected = checkpoint_bytes(undisturbed)
    again = folder / "put-back"
    run(settings(folder, again, num_steps=NUM_STEPS))
    assert checkpoint_bytes(again) == expected
    for lost in ((14,), (12, 14)):
        for step in lost:
            (again / step_folder(step) / MARKER_FILE).unlink()
        if lost == (14,):  # and once more where the run counts as done
            (again / "card.json").unlink()
        with (again / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step": 15, "lo')  # torn by the end of the process
        run(settings(folder, again))
        assert checkpoint_bytes(again) == expected
        assert metrics(again) == metrics(undisturbed)


def test_what_others_left_beside_checkpoints_and_in_the_log_stops_no_rerun(
    folder: Path, undisturbed: Path, tmp_path: Path
) -> None:
    again = shutil.copytree(undisturbed, tmp_path / "again")
    for gone in (again / step_folder(14) / MARKER_FILE, again / "card.json"):
        gone.unlink()
    (again / "checkpoints" / "latest").symlink_to("nowhere")
    (again / "wandb-latest").symlink_to("nowhere")
    (again / "checkpoints" / "notes.txt").touch()
    with (again / "metrics.jsonl").open("a") as stream:
        stream.write('{"step":3}\n{"step":12}\n')
    card = run(settings(folder, again))
    assert {k: v for k, v in checkpoint_bytes(again).items() if k != "notes.txt"} == checkpoint_bytes(undisturbed)
    assert metrics(again) == metrics(undisturbed)
    assert run(settings(folder, again)) == card  # the finished run is looked at with all of it still there
    (again / step_folder(11)).symlink_to("nowhere")
    (again / "card.json").unlink()
    with pytest.raises(StorageError, match="step-00000011 is a link to nothing"):
        run(settings(folder, again))


def test_a_process_interrupted_and_then_killed_ends_in_the_same_bytes(folder: Path, undisturbed: Path) -> None:
    output = folder / "killed"
    command = train_command(settings(folder, output))
    for step, ending in ((4, signal.SIGTERM), (8, signal.SIGKILL)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            _wait_for(output / step_folder(step) / MARKER_FILE, process)
            process.send_signal(ending)
            stdout, _ = process.communicate()
        if ending is signal.SIGTERM:
            assert process.returncode == 130
            assert "interrupted" in json.loads(stdout.splitlines()[-1])["error"]
            # Nothing is lost, wherever it stood: what it left is what the log tells of.
            assert steps_on(open_store(str(output)))[-1] == metrics(output)[-1]["step"] > 4
        assert not (output / "card.json").exists()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["content"]["num_steps"] == NUM_STEPS
    assert_told_what_it_does(done.stderr)
    assert checkpoint_bytes(output) == checkpoint_bytes(undisturbed)
    assert metrics(output) == metrics(undisturbed)


def assert_told_what_it_does(stderr: str) -> None:
    """Before the first step a line each for what takes long, and where the run goes on."""
    told = [line.partition(": ")[2] for line in stderr.splitlines() if line.startswith("INFO draftmill")]
    for start in ("reading ", "loading the target in ", "checking the target: ", "going on from step "):
        assert sum(line.startswith(start) for line in told) == 1, (start, told)


def _wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    while not file.exists():
        if process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read().decode())
        time.sleep(0.001)


def test_a_finished_run_gives_its_card_and_touches_nothing(folder: Path, undisturbed: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}
    card = run(settings(folder, undisturbed))
    assert card == json.loads((undisturbed / "card.json").read_text())
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")} == before


def test_the_card_counts_every_sample(folder: Path, undisturbed: Path) -> None:
    content = json.loads((undisturbed / "card.json").read_text())["content"]
    assert (content["rows_in"], content["rows"], content["dropped"]) == (
        SAMPLES + 1,
        SAMPLES,
        {"no anchor position": 1},
    )
    assert content["dropped_rows"][0]["id"] == "no anchor"
    assert content["mask_id"] == 261 and content["tap_ids"] == [2]
    assert [c["step"] for c in content["checkpoints"]] == [0, 12, 14]


def test_other_settings_do_not_go_on_in_the_same_output(folder: Path, undisturbed: Path) -> None:
    with pytest.raises(RecipeError, match=r"lr was 0.002, is 0.001"):
        run(settings(folder, undisturbed, lr=1e-3))


def test_a_run_is_refused_while_another_writes_there_and_changes_nothing(folder: Path) -> None:
    output = folder / "held"
    with sole_writer([str(output)]), pytest.raises(StorageError, match="is being written by another run"):
        run(settings(folder, output))
    assert not list(output.iterdir())


def test_features_kept_in_memory_survive_a_resume_bit_for_bit(folder: Path) -> None:
    whole, cut = folder / "cached", folder / "cached-cut"
    run(settings(folder, whole, feature_cache_bytes=1 << 20))
    run(settings(folder, cut, feature_cache_bytes=1 << 20))
    for step in (12, 14):
        (cut / step_folder(step) / MARKER_FILE).unlink()
    (cut / "card.json").unlink()
    run(settings(folder, cut, feature_cache_bytes=2 << 20))
    assert checkpoint_bytes(cut) == checkpoint_bytes(whole)


def test_a_run_of_muon_with_an_average_goes_on_bit_for_bit_too(folder: Path) -> None:
    whole, cut = folder / "averaged", folder / "averaged-cut"
    kinds = {"optimizer": "muon", "ema_decay": 0.9}
    run(settings(folder, whole, **kinds))
    run(settings(folder, cut, **kinds))
    for step in (12, 14):
        (cut / step_folder(step) / MARKER_FILE).unlink()
    (cut / "card.json").unlink()
    run(settings(folder, cut, **kinds))
    assert checkpoint_bytes(cut) == checkpoint_bytes(whole)
    last = whole / step_folder(NUM_STEPS)
    assert (last / "masters.safetensors").read_bytes() != (last / "model.safetensors").read_bytes()


def test_measuring_on_held_out_prompts_changes_no_weight_and_is_told_once(folder: Path, undisturbed: Path) -> None:
    said = [json.dumps({"id": f"h{i}", "prompt": f"say {i}"}) for i in range(3)]
    (folder / "held-out.jsonl").write_text("\n".join(said) + "\n")
    measured = {"eval_every": 8, "eval_input": (str(folder / "held-out.jsonl"),), "eval_max_new_tokens": 9}
    output = folder / "measured"
    run(settings(folder, output, **measured))
    assert checkpoint_bytes(output) == checkpoint_bytes(undisturbed)
    told = {line["step"]: line["tau"] for line in metrics(output) if "tau" in line}
    assert set(told) == {8, 14} and all(tau >= 1 for tau in told.values())
    (output / step_folder(14) / MARKER_FILE).unlink()
    (output / "card.json").unlink()
    before = metrics(output)
    run(settings(folder, output, **measured))
    assert metrics(output) == before


def test_both_outputs_are_written_and_a_run_goes_on_from_what_both_hold(
    folder: Path, undisturbed: Path, s3_url: str
) -> None:
    local = folder / "twice"
    run(settings(folder, local, s3_url))
    store = open_store(s3_url)
    store.delete([f"{step_folder(14)}/{MARKER_FILE}", "card.json"])
    run(settings(folder, local, s3_url))
    expected = checkpoint_bytes(undisturbed)
    assert checkpoint_bytes(local) == expected
    remote = {f.key.removeprefix("checkpoints/"): f for f in store.files() if f.key.startswith("checkpoints/")}
    assert {key: store.get(f.key) for key, f in remote.items()} == expected
    assert store.get("metrics.jsonl") == (local / "metrics.jsonl").read_bytes()


def test_a_dry_run_writes_nothing_and_says_what_is_left(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shown = run(settings(folder, folder / "dry", dry_run=True, ranks=4))
    assert "--rows-per-step 2 over 4 drafter ranks" in caplog.text, "as the run itself would tell"
    assert not (folder / "dry").exists()
    assert (shown["left"], shown["inputs"]["samples"], shown["inputs"]["dropped"]) == ({"steps": NUM_STEPS}, SAMPLES, 1)
    assert not shown["done"] and "left" in capsys.readouterr().err


def test_a_dry_run_tells_a_finished_run_from_one_that_lacks_its_last_checkpoint_or_its_card(
    folder: Path, undisturbed: Path, tmp_path: Path
) -> None:
    def told(*output: Path) -> tuple[int, bool]:
        shown = run(settings(folder, *output, dry_run=True))
        return shown["left"]["steps"], shown["done"]

    output = shutil.copytree(undisturbed, tmp_path / "copy")
    assert told(output) == (0, True)
    assert told(output, tmp_path / "another") == (0, False)  # which is given what the first one holds
    (output / "card.json").rename(output / "aside")
    assert told(output) == (0, False)
    (output / "aside").rename(output / "card.json")
    (output / step_folder(NUM_STEPS) / MARKER_FILE).unlink()
    assert told(output) == (2, False)


def test_a_dry_run_refuses_what_the_run_refuses(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    start, weightless = str(undisturbed), shutil.copytree(folder / "target", tmp_path / "weightless")
    (weightless / "model.safetensors").write_bytes(b"cut")
    for dry_run in (True, False):
        with pytest.raises(RecipeError, match=r"lr was 0.002, is 0.001"):
            run(settings(folder, tmp_path / "new", undisturbed, lr=1e-3, dry_run=dry_run))
        many = settings(folder, tmp_path / "taps", num_taps=99, dry_run=dry_run)
        with pytest.raises(RecipeError, match=r"99 taps do not fit a target of"):
            run(many.model_copy(update={"target": str(weightless)}))
        narrower = settings(folder, tmp_path / "on", intermediate_size=32, init=start, dry_run=dry_run)
        with pytest.raises(RecipeError, match=r"of another shape: intermediate_size 64 instead of 32"):
            run(narrower.model_copy(update={"target": str(weightless)}))  # told from both configs alone
    assert not list(tmp_path.rglob("checkpoints"))
    assert not run(settings(folder, tmp_path / "on", init=start, dry_run=True))["done"]
