"""What training counts as accepted is what decoding accepts: at every anchor of the target's own greedy text, the
leading run of correct slots + 1 is what the decoding cycle that starts there emits."""

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import Target, load_target  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.forms import attention_form  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.speculation.decode import Limits, Pair, decode_plainly, decode_speculatively  # noqa: E402
from draftmill.train.batches import pack  # noqa: E402
from draftmill.train.features import TargetFeatures  # noqa: E402
from draftmill.train.loop import LossOf  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.start import initial_drafter  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from tiny_drafter import MASK_ID, overfit_drafter, tiny_shape  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT, ANSWER_LEN, BLOCK = [72, 101, 108, 108, 111, 32], 48, 4
SETTINGS = TrainSettings(
    input="in", output=("out",), target="t", num_layers=2, tap_ids=(1, 3), block_size=BLOCK, loss="uniform"
)


@dataclass(frozen=True)
class Text:
    """A prompt and the target's own greedy answer."""

    target: Target
    token_ids: list[int]

    @property
    def anchors(self) -> list[int]:
        """Every place from which a whole block lies in the answer."""
        return list(range(len(PROMPT), len(self.token_ids) - BLOCK))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    target = load_target(write_tiny_target(tmp_path_factory.mktemp("target"), family="qwen3"))
    answer = decode_plainly(target, PROMPT, Limits(frozenset(), ANSWER_LEN, 64)).token_ids
    return Text(target, [*PROMPT, *answer])


def simulated(text: Text, drafter: Drafter) -> list[int]:
    """As a training step counts it: all anchors at once, in the parallel layout, through the tiled loss."""
    ids = np.array(text.token_ids)
    document = Sample("d", ids, np.arange(len(ids)) >= len(PROMPT))
    source = TargetFeatures(
        TapReader(text.target, drafter.shape.tap_ids), text.target.device, max_tokens=99, cache_bytes=0
    )
    batch = pack([document], [np.array(text.anchors)], BLOCK).with_states(source.states_of([document]), MASK_ID)
    loss_of = LossOf(text.target, SETTINGS, (), attention_form("auto", drafter.shape, text.target.device))
    return (1 + loss_of(drafter, batch).correct_NJ.long().cumprod(dim=1).sum(dim=1)).tolist()


def decoded(text: Text, drafter: Drafter) -> list[int]:
    """What the first cycle of real decoding emits behind each anchor."""
    pair, found = Pair.of(text.target, drafter), []
    for anchor in text.anchors:
        speculation = decode_speculatively(pair, text.token_ids[:anchor], Limits(frozenset(), 1 + BLOCK, 64))
        assert speculation.token_ids[0] == text.token_ids[anchor]
        found.append(speculation.emitted[0])
    return found


def test_the_simulated_acceptance_of_every_anchor_is_the_decoded_one(text: Text) -> None:
    shape = tiny_shape(text.target, block_size=BLOCK)
    half_trained = overfit_drafter(text.target, shape, PROMPT, text.token_ids[len(PROMPT) :], 10)
    found = simulated(text, half_trained)
    assert set(found) == {1, 2, 3, 4}, "the case must hold every length"
    assert found == decoded(text, half_trained)


def test_an_untrained_drafter_is_accepted_about_never(text: Text) -> None:
    untrained = initial_drafter(text.target, SETTINGS, MASK_ID).eval()
    found = simulated(text, untrained)
    assert found == decoded(text, untrained)
    assert sum(found) / len(found) < 1.1
