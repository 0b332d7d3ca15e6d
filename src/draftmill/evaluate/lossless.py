"""What must be equal: speculative and plain answers, the set's answers and plain ones, the walk and the decoding.

The only difference excused is a tie: the first one lies where the two best logits are so near each other that rounding
decides between them. Anything else is refused.
"""

from collections.abc import Sequence

from draftmill.contracts.errors import DataGateError
from draftmill.evaluate.parts import Tie
from draftmill.speculation.decode import Choice, Speculation
from draftmill.speculation.walk import Walked

# How near, by what is computed in. float32 passes of another shape differ by about 1e-5; a real fault moves logits by
# far more. bfloat16 logits between 16 and 32 lie 0.125 apart, and are rounded in every layer before.
TIE_LOGITS = {"float32": 1e-3, "bfloat16": 0.5}
# The set's answers may be those of an engine that computes in bfloat16.
SERVED_TIE_LOGITS = TIE_LOGITS["bfloat16"]


def compare_answers(
    request_id: str, between: str, plain: Choice, other_ids: Sequence[int], tie_logits: float
) -> Tie | None:
    """None where `other_ids` are the plain answer's tokens, the tie where one explains their first difference.

    DataGateError for any other difference; `between` names the two answers for people, the plain one first.
    """
    at = _first_difference(plain.token_ids, other_ids)
    if at is None:
        return None
    pair = tuple(ids[at] if at < len(ids) else -1 for ids in (plain.token_ids, other_ids))
    gap = plain.gaps[at] if at < len(plain.gaps) else float("inf")
    if gap > tie_logits:
        raise DataGateError(
            f"not lossless: {between} of prompt {request_id!r} differ at answer token {at}: {pair[0]} against "
            f"{pair[1]}, with {gap:.4g} between the two best logits (ties end at {tie_logits:g}). Nothing overrides "
            "this: drafter, target and answers do not belong together, or decoding is wrong"
        )
    return Tie(between=between, position=at, token_ids=(pair[0], pair[1]), gap=gap)


def compare_walk(request_id: str, decoded: Speculation, walked: Walked, tie_logits: float) -> Tie | None:
    """None where walk and decoding emitted the same tokens per cycle, the drafter's tie where one explains it.

    DataGateError for any other difference.
    """
    cycle = _first_difference(decoded.emitted, walked.emitted)
    if cycle is None:
        return None
    drafts = decoded.drafts[cycle], walked.drafts[cycle]
    slot = _first_difference(drafts[0].token_ids, drafts[1].token_ids)
    gap = float("inf") if slot is None else drafts[0].gaps[slot]
    if slot is None or gap > tie_logits:
        raise DataGateError(
            f"the parallel walk is not what decoding does: prompt {request_id!r}, cycle {cycle}: decoding emits "
            f"{decoded.emitted[cycle]} tokens of draft {list(drafts[0].token_ids)}, the walk {walked.emitted[cycle]} "
            f"of {list(drafts[1].token_ids)}. Nothing overrides this: training layout and decoding disagree"
        )
    pair = drafts[0].token_ids[slot], drafts[1].token_ids[slot]
    return Tie(
        between="decoding and the walk", position=sum(decoded.emitted[:cycle]) + slot + 1, token_ids=pair, gap=gap
    )


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first index at which the sequences differ, an end included; None where they are equal."""
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return None if len(first) == len(second) else min(len(first), len(second))
