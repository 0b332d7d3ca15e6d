"""An acceptance length too good to be true: held-out text that was seen, or a mask that lets a drafter see it."""

import logging

log = logging.getLogger(__name__)

# Nobody drafts unseen text this well (the best published figures are near half a block): it has been seen.
LEAK_FRAC = 0.99


def warn_of_leak(tau: float, block_size: int) -> None:
    """A warning where nearly every block of held-out text is accepted whole."""
    if tau >= LEAK_FRAC * block_size:
        log.warning(
            "acceptance length %.2f of %d on held-out prompts is too good to be true: look for held-out prompts in the "
            "training set, and run the perturbation check (tests/model/test_perturbation.py)",
            tau,
            block_size,
        )
