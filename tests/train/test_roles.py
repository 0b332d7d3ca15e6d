"""A run whose store is gone for five minutes waits for it; gone for longer, the run ends and loses no step."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.errors import StorageError  # noqa: E402
from draftmill.storage.checkpoints import step_folder, steps_on  # noqa: E402
from draftmill.storage.store import Store, open_store  # noqa: E402
from draftmill.train.data import open_input, read_data  # noqa: E402
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
