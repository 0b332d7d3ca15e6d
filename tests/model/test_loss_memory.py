"""At a vocabulary of 248,320 rows a step's loss fits in 1 GB beside weights and features, however many the anchors.

Measured as the peak of a process that does nothing else. A step of these few anchors already works on whole tiles; from
there on memory grows with the slots' hidden states alone, which a second, smaller measurement shows.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

ROWS, HIDDEN, SLOTS, MAX_ANCHORS = 248_320, 64, 15, 2_048
STEP = """
import json, resource, sys
import torch
from draftmill.model.loss import LossRule, Truth, block_loss
from draftmill.model.vocabulary import Objective

anchors, slots, rows, width, hard, kl, tv = json.loads(sys.argv[1])
head = torch.randn(rows, width)
hidden = torch.randn(anchors, slots, width, requires_grad=True)
labels = torch.randint(rows, (anchors, slots))
truth = Truth(torch.ones(anchors, slots, dtype=torch.bool), labels, torch.randn(anchors * slots, width))
rule = LossRule("d-pace", gamma=7.0, alpha=0.5, objective=Objective(hard=hard, kl=kl, tv=tv))
(head[:1] @ head[:1].T).sum()  # what the first product allocates once is not the loss's
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = block_loss(hidden, truth, head, rule)
(loss.nats / loss.weight).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak_bytes(anchors: int, *weights: float, rows: int = ROWS) -> int:
    """How much further a step of that many anchors pushes the peak of its process."""
    given = json.dumps([anchors, SLOTS, rows, HIDDEN, *weights])
    done = subprocess.run([sys.executable, "-c", STEP, given], capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout)


@pytest.mark.parametrize(("anchors", "weights"), [(36, (1.0, 1.0, 0.0)), (8, (0.0, 0.0, 1.0))], ids=["kl", "tv"])
def test_a_step_over_a_quarter_million_rows_stays_far_below_a_gigabyte(anchors: int, weights: list[float]) -> None:
    assert peak_bytes(anchors, *weights) < 300_000_000


def test_more_anchors_cost_their_hidden_states_and_nothing_else() -> None:
    # Few rows, so that all anchors take a second: tiles do not grow with the vocabulary (the test above).
    state_bytes = MAX_ANCHORS * SLOTS * HIDDEN * 4
    few, all_of_them = (peak_bytes(anchors, 1.0, 1.0, 0.0, rows=512) for anchors in (64, MAX_ANCHORS))
    assert all_of_them - few < 6 * state_bytes
    assert 300_000_000 + 6 * state_bytes < 1_000_000_000
