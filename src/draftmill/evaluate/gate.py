"""The gate before the card: an acceptance length that was promised and not reached, or one too good to be true."""

import logging
from typing import Any

from draftmill.contracts.errors import DataGateError

log = logging.getLogger(__name__)

# Nobody drafts unseen text this well (the best published figures are near half a block): it has been seen.
LEAK_FRAC = 0.99


def warn_of_leak(content: dict[str, Any]) -> None:
    """A warning where nearly every block of held-out text is accepted whole."""
    if content["tau"] >= LEAK_FRAC * content["block_size"]:
        log.warning(
            "acceptance length %.2f of %d on held-out prompts is too good to be true: look for held-out prompts in the "
            "training set, and run the perturbation check (tests/model/test_perturbation.py)",
            content["tau"],
            content["block_size"],
        )


def check_tau(content: dict[str, Any], min_tau: float) -> None:
    """DataGateError where tau lies below `min_tau`."""
    if content["tau"] < min_tau:
        raise DataGateError(
            f"acceptance length {content['tau']:.3f} over {content['num_requests']} held-out prompts is below "
            f"{min_tau:g} (micro {content['tau_micro']:.3f}): train longer or on more prompts, or lower --min-tau"
        )
