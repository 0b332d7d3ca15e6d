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
from draftmill.train.asking import Asked, Asking  # noqa: E402
from draftmill.train.held_out import HeldOut  # noqa: E402
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
    asking = Asking(Lines(0, lines), EVERY, torch.float32)
    asked = Asked(Lines(LAYOUT.first_target, lines), held_out, NUM_STEPS, done=0)
    assert [step for step in range(1, NUM_STEPS + 1) if asking.is_due(step, NUM_STEPS)] == list(drafters)
    with ThreadPoolExecutor(1) as pool:
        # The target's rank reads the rows of two steps at a time, and none is asked about twice.
        rank = pool.submit(lambda: [asked.until(step) for step in (0, 2, 4, 4, 6, 8, NUM_STEPS)])
        figures = {step: asking.measure(drafter) for step, drafter in drafters.items()}
        rank.result(timeout=60)
    for step, drafter in drafters.items():
        wanted = held_out.measure(drafter)
        assert {**figures[step], "eval_s": 0} == {**wanted, "eval_s": 0}
    assert figures[8]["tau"] > 1.1 > figures[4]["tau"]


def test_a_run_that_goes_on_is_not_measured_where_it_stands(held_out: HeldOut) -> None:
    asked = Asked(Lines(LAYOUT.first_target, {}), held_out, NUM_STEPS, done=8)
    asked.until(8)  # would wait for weights
    asked.until(9)
    assert asked.done == 9
