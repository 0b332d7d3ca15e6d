"""Weights that rank 0 gives away come back as the figures that the target's rank finds, at the steps that are due."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from draftmill.extract.target import Target, load_target  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.speculation.decode import Limits, decode_plainly  # noqa: E402
from draftmill.speculation.requests import Request  # noqa: E402
from draftmill.train.asking import Asked, Asking, until_next_due  # noqa: E402
from draftmill.train.held_out import HeldOut, is_due  # noqa: E402
from draftmill.train.layout import Layout  # noqa: E402
from draftmill.train.lending import put_together, taken_apart  # noqa: E402
from draftmill.train.ranks import Ranks  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from tiny_drafter import overfit_drafter, random_drafter, tiny_shape  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT, NEW_TOKENS, EVERY, NUM_STEPS = (257, *range(40, 51)), 21, 4, 10
LAYOUT = Layout(num_drafters=2, num_targets=1, is_split=True)


class Lines(Ranks):
    """Ranks that give each other things as real ones do, over queues."""

    def __init__(self, rank: int, to: dict[int, Queue]) -> None:
        super().__init__(LAYOUT, rank, (torch.device("cpu"),), None)
        self._to = to

    def give(self, to: int, value: Any, what: str) -> None:
        structure, tensors = taken_apart(value)
        assert all(tensor.device.type == "cpu" for tensor in tensors), what
        self._to[to].put((structure, [tensor.clone() for tensor in tensors]))

    def take(self, source: int, what: str) -> Any:
        assert source != self.rank, what
        structure, numbers = self._to[self.rank].get(timeout=60)
        value, tensors = put_together(structure)
        for room, given in zip(tensors, numbers, strict=True):
            room.detach().copy_(given)
        return value


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def held_out(target: Target) -> HeldOut:
    answer = decode_plainly(target, PROMPT, Limits(frozenset(), NEW_TOKENS, 2048)).token_ids
    chosen = {"save_every": 2, "eval_every": EVERY, "eval_input": ("in",), "eval_max_new_tokens": NEW_TOKENS}
    settings = TrainSettings(input="in", output=("out",), target="t", **chosen)  # type: ignore[arg-type]
    return HeldOut(target, [Request("r", "all", PROMPT, answer)], frozenset(), settings)


def test_figures_are_those_of_the_weights_that_were_given_away(target: Target, held_out: HeldOut) -> None:
    answer = held_out.walked[0].answer_ids
    half_trained = overfit_drafter(target, tiny_shape(target), PROMPT, answer, num_steps=10)
    drafters = {
        4: random_drafter(tiny_shape(target)),
        8: half_trained,
        NUM_STEPS: random_drafter(tiny_shape(target), 1),
    }
    lines: dict[int, Queue] = {0: Queue(), LAYOUT.first_target: Queue()}
    asking = Asking(Lines(0, lines), torch.float32)
    asked = Asked(Lines(LAYOUT.first_target, lines), held_out, EVERY, NUM_STEPS, measured=0)
    assert [step for step in range(1, NUM_STEPS + 1) if is_due(EVERY, step, NUM_STEPS)] == list(drafters)
    with ThreadPoolExecutor(1) as pool:
        # The target's rank reads the rows of two steps at a time, and none is asked about twice.
        rank = pool.submit(lambda: [asked.until(step) for step in (0, 2, 4, 4, 6, 8, NUM_STEPS)])
        figures = {step: asking.measure(drafter) for step, drafter in drafters.items()}
        rank.result(timeout=60)
    for step, drafter in drafters.items():
        wanted = held_out.measure(drafter)
        assert {**figures[step], "eval_s": 0} == {**wanted, "eval_s": 0}
    assert figures[8]["tau"] > 1.1 > figures[4]["tau"]


def test_a_run_that_goes_on_is_measured_where_it_stands_only_if_that_was_cut_off(
    target: Target, held_out: HeldOut
) -> None:
    lines: dict[int, Queue] = {0: Queue(), LAYOUT.first_target: Queue()}
    asked = Asked(Lines(LAYOUT.first_target, lines), held_out, EVERY, NUM_STEPS, measured=8)
    asked.until(8)  # would wait for weights
    asked.until(9)
    assert asked.measured == 9
    asked = Asked(Lines(LAYOUT.first_target, lines), held_out, EVERY, NUM_STEPS, measured=7)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asked.until, 8)
        assert Asking(Lines(0, lines), torch.float32).measure(random_drafter(tiny_shape(target)))["tau"] >= 1


def test_no_row_is_asked_for_that_comes_after_weights_to_be_measured() -> None:
    done = 0
    may_ask = until_next_due(lambda step: step < 9, lambda: done, EVERY, NUM_STEPS)
    ahead = {}
    for done in range(NUM_STEPS):  # read by the function above
        ahead[done] = [step for step in range(done, NUM_STEPS) if may_ask(step)]
    assert (ahead[0], ahead[3], ahead[4], ahead[7]) == ([0, 1, 2, 3], [3], [4, 5, 6, 7], [7])
    assert ahead[8] == [8], "step 9 is not planned yet"
    may_ask = until_next_due(lambda step: True, lambda: 0, None, NUM_STEPS)
    assert all(map(may_ask, range(NUM_STEPS)))
