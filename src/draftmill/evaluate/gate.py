"""The gate before the card: an acceptance length that was promised and not reached."""

from typing import Any

from draftmill.contracts.errors import DataGateError


def check_tau(content: dict[str, Any], min_tau: float) -> None:
    """DataGateError where `tau` lies below `min_tau`."""
    if content["tau"] < min_tau:
        raise DataGateError(
            f"acceptance length {content['tau']:.3f} over {content['num_requests']} held-out prompts is below "
            f"{min_tau:g} (micro {content['tau_micro']:.3f}): train longer or on more prompts, or lower --min-tau"
        )
