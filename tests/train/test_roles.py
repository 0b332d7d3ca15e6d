"""A run whose store is gone waits for it, and loses no step where it stays away; nor does one that ends while it is
measured, which its rerun makes up for."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.errors import StorageError  # noqa: E402
from draftmill.speculation.requests import Request  # noqa: E402
from draftmill.storage.checkpoints import step_folder, steps_on  # noqa: E402
from draftmill.storage.patience import Patiently  # noqa: E402
from draftmill.storage.store import Store, open_store  # noqa: E402
from draftmill.train.data import open_input, read_data  # noqa: E402
from draftmill.train.held_out import MeasuringError  # noqa: E402
from draftmill.train.interruption import StoppedError  # noqa: E402
from draftmill.train.keep import Checkpoints  # noqa: E402
from draftmill.train.ranks import alone  # noqa: E402
from draftmill.train.roles import Job, take_part  # noqa: E402
from small_run import NUM_STEPS, SAVE_EVERY, small_settings, write_small_run  # noqa: E402
from storage.far_store import FarStore, Line  # noqa: E402

pytestmark = pytest.mark.torch

PATIENCE_S = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("roles"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trained(folder: Path, far: FarStore) -> FarStore:
    """The run from where it stands in the store to its end, by one process."""
    settings = small_settings(folder, far.url)
    data = read_data(settings, open_input(settings), folder / "target")
    patiently = far.line.clock.patiently(PATIENCE_S)
    checkpoints = Checkpoints((far,), "plan", NUM_STEPS, SAVE_EVERY, 2, patiently)
    take_part(Job(settings, data, folder / "target", alone(torch.device("cpu"))), checkpoints)
    return far


def last_checkpoint(far: FarStore) -> dict[str, bytes]:
    start = step_folder(NUM_STEPS)
    return {file.key: far.get(file.key) for file in far.files() if file.key.startswith(start)}


def num_lines(store: Store) -> int:
    return len(store.get("metrics.jsonl").splitlines())


def test_a_run_waits_five_minutes_for_the_store_of_its_last_checkpoint(folder: Path) -> None:
    far = trained(folder, FarStore(line=Line(cuts={step_folder(NUM_STEPS): 300})))
    assert 300 <= far.line.clock.now < PATIENCE_S
    assert steps_on(far) == [0, SAVE_EVERY, NUM_STEPS] and num_lines(far) == NUM_STEPS
    assert last_checkpoint(far) == last_checkpoint(trained(folder, FarStore()))


def test_a_run_whose_store_stays_away_leaves_its_last_step_on_this_host_and_goes_on_from_it(
    folder: Path, cache: Path
) -> None:
    far = FarStore(line=Line(cuts={step_folder(SAVE_EVERY): 9999}))
    with pytest.raises(StorageError, match=r"s3://far/away: given up after .* without an answer of the store"):
        trained(folder, far)
    left = open_store(str(cache / "stopped" / "plan"))
    assert SAVE_EVERY < steps_on(left)[-1] == num_lines(left), "every step that was made is kept"
    far.line.cut(0)
    trained(folder, far)
    assert last_checkpoint(far) == last_checkpoint(trained(folder, FarStore()))
    assert num_lines(far) == NUM_STEPS and not (cache / "stopped" / "plan").exists()


PROMPTS = ((7, 8, 9), (20, 30, 40, 50), (100, 101))


class Full(tuple[int, ...]):
    """A prompt that no device has room to read."""

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):  # read as a chunk; a type checker looks at single tokens
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return super().__getitem__(where)


class Stopping(tuple[int, ...]):
    """A prompt while which is read the run is asked to stop."""

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            signal.raise_signal(signal.SIGTERM)
        return super().__getitem__(where)


@pytest.fixture(autouse=True)
def outlive_sigterm() -> Iterator[None]:
    """Where nobody listens it would end all tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


def measured(folder: Path, output: Path, kind: type[tuple[int, ...]], every: int) -> list[dict[str, Any]]:
    """The run from where it stands, measured on prompts of a kind; its lines without what the clock says."""
    settings = small_settings(folder, output, eval_every=every, eval_input=("e",), eval_max_new_tokens=5)
    data = read_data(small_settings(folder, output), open_input(settings), folder / "target")
    requests = tuple(Request(f"h{i}", "all", kind(prompt), (1, 2, 3)) for i, prompt in enumerate(PROMPTS))
    store = open_store(str(output), create=True)
    checkpoints = Checkpoints((store,), "plan", NUM_STEPS, SAVE_EVERY, 2, Patiently(0))
    job = Job(settings, replace(data, held_out=requests), folder / "target", alone(torch.device("cpu")))
    take_part(job, checkpoints)
    return lines_in(output)


def lines_in(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith(("_frac", "_s", "_bytes"))} for line in lines]


@pytest.mark.parametrize(
    ("kind", "error", "every"), [(Full, MeasuringError, SAVE_EVERY), (Stopping, StoppedError, NUM_STEPS)]
)
def test_a_run_that_ends_while_it_is_measured_goes_on_with_that(
    folder: Path, tmp_path: Path, kind: type[tuple[int, ...]], error: type[BaseException], every: int
) -> None:
    undisturbed, output = measured(folder, tmp_path / "undisturbed", tuple, every), tmp_path / "out"
    assert [line["step"] for line in undisturbed if "tau" in line] == sorted({every, NUM_STEPS})
    for _ in range(2):  # the second time before it goes on
        with pytest.raises(error):
            measured(folder, output, kind, every)
        assert steps_on(open_store(str(output)))[-1] == every == len(lines_in(output))
        assert "tau" not in lines_in(output)[-1]
    assert measured(folder, output, tuple, every) == undisturbed
