"""Whether a target knows the text it is to be drafted for, and ends as a drafter takes it to end.

Random or foreign weights do not know the text.

A loader that leaves weights at random reports success, and a drafter then learns nothing for nobody (the loss stands
still at four digits, NVIDIA-NeMo/Automodel#3173). So before training a few samples go through the whole target, head
included, and the beginning of one answer is decoded greedily.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from draftmill.contracts.errors import DataGateError, InputError
from draftmill.extract.decode import decode_greedy
from draftmill.extract.taps import TapReader
from draftmill.extract.target import Target

log = logging.getLogger(__name__)

# Enough to tell a target from noise, few enough to cost a second or two on a CPU.
DECODED_TOKENS = 12
JUDGED_TOKENS = 64


@dataclass(frozen=True)
class Text:
    """One document: its tokens, and where its answer begins."""

    token_ids: Sequence[int]
    answer_start: int


def sound_texts(reader: TapReader, texts: Iterable[Text], count: int) -> list[Text]:
    """The first `count` texts that leave all that is read of the target finite; the very first one where none does.

    A sample may overflow a target that reads all others well, and nothing can be checked on it.
    """
    sound: list[Text] = []
    spoilt: list[Text] = []
    for text in texts:
        (sound if _is_finite(reader, text) else spoilt).append(text)
        if len(sound) == count:
            break
    if sound and spoilt:
        log.warning("hidden states of %d of the first samples are not finite: others are checked", len(spoilt))
    return sound or spoilt[:1]


def _is_finite(reader: TapReader, text: Text) -> bool:
    ids_1T = torch.tensor([list(text.token_ids)], device=reader.target.device)
    read = reader.read_row(ids_1T, None)
    return all(bool(s.isfinite().all()) for s in (read.features_RTF, read.last_RTH) if s is not None)


def check_target(target: Target, texts: Sequence[Text], min_agreement: float) -> None:
    """DataGateError where the target finds too few of the answers' tokens most likely itself; InputError where its
    logits are more than its head on its final norm."""
    _check_ends(target, texts[0])
    found = [same for text in texts for same in _agreements(target, text)]
    share = sum(found) / max(len(found), 1)
    log.info("the target agrees with %.0f %% of %d tokens of the set", 100 * share, len(found))
    begins = _decoded(target, texts[0])
    log.info("decoded greedily, the first %d tokens of an answer are the set's own: %d", DECODED_TOKENS, begins)
    if share < min_agreement:
        raise DataGateError(
            f"the target finds {100 * share:.1f} % of {len(found)} answer tokens most likely itself, less than "
            f"--min-agreement {min_agreement:g}, and decodes {begins} of an answer's first tokens: its weights are "
            "random, or another model wrote these answers; generate them with this target, or lower it"
        )


@torch.no_grad()
def _check_ends(target: Target, text: Text) -> None:
    """Drafter and loss take logits for the head on the final norm: some families scale or cap them besides."""
    last: list[torch.Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _norm, args: last.append(args[0].clone()))
    ids_1T = torch.tensor([list(text.token_ids[:JUDGED_TOKENS])], device=target.device)
    try:
        logits_TV = target.model(input_ids=ids_1T).logits[0]
    finally:
        hook.remove()
    assert len(last) == 1, f"the final norm runs once a pass; it ran {len(last)} times"
    if not logits_TV.isfinite().all():  # first: a NaN equals nothing
        raise InputError(f"{type(target.model).__name__} gives logits that are not finite; load it in a wider dtype")
    off = (target.head(target.norm(last[0]))[0].to(logits_TV.device) - logits_TV).abs().max()
    most = logits_TV.abs().max()
    if not off <= float(torch.finfo(logits_TV.dtype).eps) * most:  # both are the same products, in the same order
        raise InputError(
            f"{type(target.model).__name__} makes more of its logits than its head on its final norm (up to {off:.3g} "
            f"apart, of logits up to {most:.3g}: a scale, a cap?): a drafter would learn another distribution; such "
            "families are not supported"
        )


@torch.no_grad()
def _agreements(target: Target, text: Text) -> list[bool]:
    """For the first answer tokens, whether each is the target's choice behind the text before it."""
    start = max(text.answer_start, 1)
    ids_1T = torch.tensor([list(text.token_ids[: start + JUDGED_TOKENS])], device=target.device)
    num_judged = ids_1T.shape[1] - start
    logits_JV = target.model(input_ids=ids_1T, logits_to_keep=num_judged + 1).logits[0, :-1]
    return (logits_JV.argmax(dim=-1) == ids_1T[0, start:]).tolist()


def _decoded(target: Target, text: Text) -> int:
    """How many leading tokens of the answer the target writes by itself."""
    start = max(text.answer_start, 1)
    answer = decode_greedy(target, [text.token_ids[:start]], frozenset(), DECODED_TOKENS)[0]
    pairs = zip(answer.token_ids, text.token_ids[start:], strict=False)
    return next((count for count, (mine, theirs) in enumerate(pairs) if mine != theirs), len(answer.token_ids))
