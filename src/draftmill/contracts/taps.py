"""Which target layers a drafter reads.

Tap id `i` is a 0-based decoder layer; its feature is the residual stream right after layer `i`
(Hugging Face `hidden_states[i + 1]`). Follows DFlash (arXiv 2602.06036) and the z-lab checkpoints.
"""

from collections.abc import Sequence

from draftmill.contracts.errors import RecipeError


def default_tap_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Tap ids spread evenly over layers 1 .. num_layers - 3, ascending; RecipeError where they would repeat."""
    if num_taps == 1:
        return check_tap_ids((num_layers // 2,), num_layers)
    ids = _spread(num_layers, num_taps)
    if len(set(ids)) < num_taps:
        largest = max((k for k in range(2, num_taps) if len(set(_spread(num_layers, k))) == k), default=1)
        raise RecipeError(
            f"{num_taps} taps do not fit a target of {num_layers} layers (ids {list(ids)} repeat): "
            f"set --num-taps to at most {largest}, or name --tap-ids"
        )
    return check_tap_ids(ids, num_layers)


def _spread(num_layers: int, num_taps: int) -> tuple[int, ...]:
    return tuple(round(1 + k * (num_layers - 4) / (num_taps - 1)) for k in range(num_taps))


def chosen_tap_ids(named: Sequence[int], num_taps: int, num_layers: int) -> tuple[int, ...]:
    """The tap ids that settings ask for: those they name, checked, or `num_taps` spread evenly."""
    return check_tap_ids(named, num_layers) if named else default_tap_ids(num_layers, num_taps)


def check_tap_ids(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The ids unchanged if they are distinct, ascending and in [0, num_layers - 2]; RecipeError otherwise."""
    ids = tuple(tap_ids)
    if not ids or list(ids) != sorted(set(ids)):
        raise RecipeError(f"taps {list(ids)} must be distinct and ascending, and at least one (--tap-ids)")
    if ids[0] < 0 or ids[-1] > num_layers - 2:
        raise RecipeError(
            f"taps {list(ids)} (--tap-ids) must lie in [0, {num_layers - 2}] for a target of {num_layers} layers; "
            f"layer {num_layers - 1} is never a tap: engines read it before the final norm, Hugging Face after it"
        )
    return ids
