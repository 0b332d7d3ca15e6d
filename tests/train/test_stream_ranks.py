"""On a set that is still being made several ranks end in one process's weights; a maker that stops, and SIGTERM while
they wait, end them all, and no step is lost."""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
from draftmill.contracts.errors import EXIT_FAILED, EXIT_INTERRUPTED
from draftmill.train.launch import RankFailedError
from draftmill.train.run import run
from sample_sets import Producer
from small_run import run_in_turn, train_command
from small_stream import first_step_of, producer, run_on_the_finished_set, steps_in, stream_settings, weights
from tiny import write_tiny_target

pytestmark = pytest.mark.torch

TOGETHER = {"split": {"placement": "split"}, "shared": {"ranks": 2}}
# A part that is not there at first; the ones before it are.
AWAITED = 2
COMES_S = 120
# What the command promises; it must not be the maker's time limit that ends it.
ENDS_S, LONG_S = 60, 110


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target") / "target", num_layers=4, hidden_size=32)


@pytest.fixture(scope="module")
def undisturbed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_the_finished_set(target, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def before_awaited(target: Path, undisturbed: Path) -> int:
    """How many steps can be made without the awaited part."""
    return first_step_of(stream_settings(target, undisturbed.parent / "samples", undisturbed), AWAITED)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def of_ranks(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RankFailedError]:
    """Where two ranks ran on sets that were made meanwhile, apart and sharing, and how they ended when one was not."""
    place = tmp_path_factory.mktemp("ranks")
    makers = {name: producer(target, place / name / "samples") for name in (*TOGETHER, "stalled")}
    makers["stalled"].publish(0, 1, 3)
    makings = threading.Thread(
        target=lambda: [make_meanwhile(makers[name], place / name / "run") for name in TOGETHER], daemon=True
    )
    changes = {**TOGETHER, "stalled": {"placement": "split", "stall_timeout_s": 3}}
    turns = [
        {**changed, "input": str(place / name / "samples"), "output": (str(place / name / "run"),)}
        for name, changed in changes.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTMILL_CACHE", str(place / "cache"))
        makings.start()
        with pytest.raises(RankFailedError) as failure:
            run_in_turn(stream_settings(target, place, place), 2, turns)
    return place, failure.value


def make_meanwhile(maker: Producer, output: Path) -> None:
    """Makes the set out of order, and most of it when the run has made a step already."""
    maker.publish(3, 0)
    wait_for(lambda: num_lines(output) > 0)
    for part in (4, 2, 1):
        time.sleep(0.1)
        maker.publish(part)
    maker.finish()


def wait_for(has_come: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Returns when it has; the process's own words where it ends before."""
    until = time.monotonic() + COMES_S
    while not has_come():
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[1].decode())
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.01)


def num_lines(output: Path) -> int:
    """The steps that a run has told of."""
    log = output / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_that_read_what_is_being_made_end_as_one_process_on_the_finished_set(
    of_ranks: tuple[Path, RankFailedError], undisturbed: Path, name: str
) -> None:
    """A row a step: one of two ranks that share has none, and takes part with nothing."""
    assert weights(of_ranks[0] / name / "run") == weights(undisturbed)


def test_a_maker_that_stops_ends_all_ranks_with_the_words_of_one_error(
    of_ranks: tuple[Path, RankFailedError], before_awaited: int
) -> None:
    place, failure = of_ranks
    assert failure.exit_code == EXIT_FAILED
    words = str(failure)
    assert words.startswith("rank ") and words.count("is awaited since") == 1
    assert "part-00002 of" in words and "(--stall-timeout-s 3); 3 of 5 parts are there" in words
    assert steps_in(place / "stalled" / "run")[-1] == before_awaited


def test_who_waits_for_the_next_part_is_stopped_by_sigterm_and_goes_on_to_the_same_weights(
    target: Path, undisturbed: Path, before_awaited: int, tmp_path: Path
) -> None:
    maker, output = producer(target, tmp_path / "samples"), tmp_path / "run"
    settings = stream_settings(target, tmp_path / "samples", output, stall_timeout_s=LONG_S)
    maker.publish(0, 1, 3)
    with subprocess.Popen(train_command(settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: num_lines(output) == before_awaited, process)
        assert_interrupted(process)
    assert steps_in(output)[-1] == before_awaited
    maker.finish()
    run(settings)
    assert_same(output, undisturbed)


def assert_interrupted(process: "subprocess.Popen[bytes]", meanwhile: Callable[[], None] = lambda: None) -> str:
    """SIGTERM ends the command as it should; what it told on stderr."""
    process.terminate()
    meanwhile()
    stdout, stderr = process.communicate(timeout=ENDS_S)
    assert process.returncode == EXIT_INTERRUPTED
    assert "interrupted" in json.loads(stdout.splitlines()[-1])["error"]
    return stderr.decode()


def assert_told_once(stderr: str) -> None:
    """What takes long before the first step is told by one rank: of the run by rank 0, of the target by its own."""
    told = [line.partition(": ")[2] for line in stderr.splitlines() if line.startswith("INFO draftmill")]
    of_the_run = ("starting 2 ranks", "reading ", "waiting for rank 1 (target 0)", "attention: ", "a new run of ")
    for start in (*of_the_run, "loading the target in ", "checking the target: ", "the target agrees with "):
        assert sum(line.startswith(start) for line in told) == 1, (start, told)


def assert_same(output: Path, undisturbed: Path) -> None:
    """All checkpoints that the undisturbed run has kept are there, bit for bit."""
    expected, found = weights(undisturbed), weights(output)
    assert {name: data for name, data in found.items() if name in expected} == expected


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.chaos)], ids=["heeds", "hangs"])
def test_a_drafter_rank_that_waits_for_states_is_stopped_by_sigterm_whether_its_target_rank_heeds_it_or_hangs(
    target: Path, undisturbed: Path, before_awaited: int, tmp_path: Path, cache: Path, hangs: bool
) -> None:
    maker, output = producer(target, tmp_path / "samples"), tmp_path / "run"
    settings = stream_settings(target, tmp_path / "samples", output, stall_timeout_s=LONG_S)
    maker.publish(0, 1, 3)
    apart = train_command(settings.model_copy(update={"placement": "split"}))
    with subprocess.Popen(apart, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: num_lines(output) == before_awaited, process)
        reading = target_rank(process)
        reading.suspend()
        before = num_findings(cache)
        maker.finish()
        # The drafter rank has looked through the part, so what it awaits next are the states of its first row.
        wait_for(lambda: num_findings(cache) >= before + 2, process)
        time.sleep(0.5)
        told = assert_interrupted(process, lambda: None if hangs else reading.resume())
    assert_told_once(told)
    # A target rank that heeds the signal sends the row it is at first.
    assert before_awaited <= steps_in(output)[-1] == num_lines(output)
    assert not hangs or num_lines(output) == before_awaited
    run(settings)
    assert_same(output, undisturbed)


def target_rank(process: "subprocess.Popen[bytes]") -> psutil.Process:
    """The rank started last: drafter ranks come first."""
    ranks = [rank for server in psutil.Process(process.pid).children() for rank in server.children()]
    assert len(ranks) == 2
    return max(ranks, key=lambda rank: (rank.create_time(), rank.pid))


def num_findings(cache: Path) -> int:
    """What was found in parts so far, two findings a part."""
    return sum(".tmp-" not in path.name for path in (cache / "findings").iterdir())
