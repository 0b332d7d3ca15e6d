"""The work on one part: load the models once, decode and walk its requests, time both."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from draftmill.evaluate.lossless import SERVED_TIE_LOGITS, TIE_LOGITS, compare_answers, compare_walk
from draftmill.evaluate.parts import DECODED, WALKED, Measured, Spending, Spent, Tie, Work, publish
from draftmill.evaluate.sources import Sources
from draftmill.extract.spread import device_kind, first_devices, place
from draftmill.extract.target import DTYPES, load_target, refuse_unfit_hybrid
from draftmill.model.checkpoint import load_drafter
from draftmill.progress import Progress
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.speculation.decode import Limits, Pair, decode_plainly, decode_speculatively
from draftmill.speculation.requests import Request
from draftmill.speculation.walk import walk_answer
from draftmill.storage.sets import SetWriter


@dataclass(frozen=True)
class Bench:
    """The loaded models, and where answers end."""

    pair: Pair
    untrained: Pair | None
    limits: Limits
    tie_logits: float
    """How near the two best logits of a tie are, in what the models compute in."""


def open_bench(sources: Sources, stop_ids: frozenset[int], settings: EvaluateSettings) -> Bench:
    """Loads target and drafters; InputError where they do not belong together."""
    torch.set_num_threads(settings.threads)
    devices = first_devices(device_kind(settings.device), settings.target_gpus)
    target = load_target(sources.target, DTYPES[settings.compute_dtype])
    refuse_unfit_hybrid(target, devices[0])
    place(target, devices)
    return Bench(
        Pair.of(target, load_drafter(sources.drafter)),
        Pair.of(target, load_drafter(sources.untrained)) if sources.untrained else None,
        Limits(stop_ids, settings.max_new_tokens, settings.prefill_tokens),
        TIE_LOGITS[settings.compute_dtype],
    )


def measure_missing(bench: Bench, writer: SetWriter, work: Work) -> None:
    """Makes and publishes every missing part. Decoding takes far longer than walking: each has its own time left."""
    missing = writer.missing()
    for kind, requests in ((DECODED, work.decoded), (WALKED, work.walked)):
        parts = [part for part in missing if part.name.startswith(kind)]
        by_id = {request.id: request for request in requests}
        num_done = len(by_id) - sum(len(part.inputs) for part in parts)
        progress = Progress(f"evaluate, {kind}", len(by_id), "prompts", num_done)
        for part in parts:
            rows, spending = [], Spending()
            for request_id in part.inputs:
                rows.append(_measured(bench, by_id[request_id], kind, work, spending))
                progress.advance(1, request_id)
            publish(writer, part.name, rows, spending)


def _measured(bench: Bench, request: Request, kind: str, work: Work, spending: Spending) -> Measured:
    if kind == DECODED:
        return decode_request(bench, request, request.id in work.untrained, spending)
    with _timed(spending, "walk"):
        walked = walk_answer(bench.pair, request.prompt_ids, bench.limits.cut(request.answer_ids))
    return Measured(id=request.id, family=request.family, walked=walked.emitted)


def decode_request(bench: Bench, request: Request, with_untrained: bool, spending: Spending) -> Measured:
    """Decodes one request both ways and walks the answer; DataGateError where anything but a tie differs."""
    prompt_ids, limits = request.prompt_ids, bench.limits
    with _timed(spending, "plain") as spent:
        plain = decode_plainly(bench.pair.target, prompt_ids, limits)
        spent.passes = len(plain.token_ids)
    with _timed(spending, "speculative") as spent:
        decoded = decode_speculatively(bench.pair, prompt_ids, limits)
        spent.passes = 1 + len(decoded.emitted)
    with _timed(spending, "walk"):
        walked = walk_answer(bench.pair, prompt_ids, decoded.token_ids)
    same = partial(compare_answers, request.id, tie_logits=bench.tie_logits)
    ties = [
        same("plain and speculative answers", plain, decoded.token_ids),
        compare_walk(request.id, decoded, walked, bench.tie_logits),
    ]
    if request.answer_ids:
        known = limits.cut(request.answer_ids)
        # An answer that was cut when it was made says nothing about what follows.
        comparable = plain if limits.is_complete(known) else plain.first(len(known))
        ties.append(same("plain answer and the set's answer", comparable, known, tie_logits=SERVED_TIE_LOGITS))
    untrained = None
    if bench.untrained is not None and with_untrained:
        first = decode_speculatively(bench.untrained, prompt_ids, limits)
        ties.append(same("plain and untrained speculative answers", plain, first.token_ids))
        untrained = first.emitted
    return Measured(
        id=request.id,
        family=request.family,
        walked=walked.emitted,
        decoded=decoded.emitted,
        untrained=untrained,
        ties=tuple(tie for tie in ties if isinstance(tie, Tie)),
    )


@contextmanager
def _timed(spending: Spending, name: str) -> Iterator[Spent]:
    """Adds the seconds of the body to `spending[name]`, and the passes that the body notes."""
    wall, cpu = time.perf_counter(), time.process_time()
    spent = Spent()
    yield spent
    spent.wall_s, spent.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    spending.setdefault(name, Spent()).add(spent)
