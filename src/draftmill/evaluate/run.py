"""`draftmill evaluate`: how many tokens a target emits per pass with this drafter, measured losslessly.

In: a drafter's checkpoint, held-out prompts with the target's own greedy answers, the target. Out: a set of measured
prompts whose card holds the acceptance length. Torch is imported late: a finished evaluation is shown without it.
"""

import sys
from typing import Any

import msgspec

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.cards import Card, make_card
from draftmill.evaluate.figures import figures, readable, timings
from draftmill.evaluate.gate import check_tau
from draftmill.evaluate.parts import Work, make_plan, read_back
from draftmill.evaluate.preview import preview
from draftmill.evaluate.sources import Sources, find_sources, share_out
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.speculation.leak import warn_of_leak
from draftmill.speculation.requests import read_material
from draftmill.storage.models import vocab_size
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter, open_set_writer

# What changes the figures; where things lie is told by the plan's inputs.
CONTENT_SETTINGS = {
    "decode_prompts",
    "decode_prompts_untrained",
    "max_new_tokens",
    "reported_apart",
    "prefill_tokens",
    "compute_dtype",
    "threads",
    "seed",
}


def run(settings: EvaluateSettings) -> dict[str, Any]:
    """Does what is missing of the evaluation, puts it to the gate, and returns its card."""
    watch = Stopwatch()
    sources = find_sources(settings.target, settings.checkpoint, settings.decode_prompts_untrained > 0)
    chat = open_chat(sources.target)
    material = read_material(settings.input, chat, vocab_size(sources.target))
    work, left_out = share_out(material, settings, sources)
    plan = make_plan(_recipe(settings, sources, chat), material, sources.files, work)
    if settings.dry_run:
        return preview(settings, plan)
    writer = open_set_writer(settings.output, plan)
    facts = {
        "step": sources.step,
        "block_size": sources.shape.block_size,
        "max_new_tokens": settings.max_new_tokens,
        "template_hash": chat.template_hash,
        "left_out": msgspec.to_builtins(left_out),
    }
    card = writer.card()
    if card is None:
        _measure(writer, work, sources, chat, settings)
        card = _finish(writer, facts, settings, watch)
    check_tau(card.content, settings.min_tau)
    warn_of_leak(card.content["tau"], card.content["block_size"])
    sys.stderr.write(readable(card.content, card.run["timings"]))
    return msgspec.to_builtins(card)


def _recipe(settings: EvaluateSettings, sources: Sources, chat: Chat) -> dict[str, Any]:
    """What the figures follow from: settings, the target, how it is spoken to and what ends its answers."""
    return {
        **settings.model_dump(mode="json", include=CONTENT_SETTINGS),
        "target": sources.target_fingerprint,
        "template_hash": chat.template_hash,
        "stop_ids": sorted(chat.stop_ids),
    }


def _measure(writer: SetWriter, work: Work, sources: Sources, chat: Chat, settings: EvaluateSettings) -> None:
    """Makes the parts that are missing."""
    if writer.missing():
        from draftmill.evaluate.measure import measure_missing, open_bench

        measure_missing(open_bench(sources, chat.stop_ids, settings), writer, work)


def _finish(writer: SetWriter, facts: dict[str, Any], settings: EvaluateSettings, watch: Stopwatch) -> Card:
    """The card over all parts, published once it has passed the gate."""
    rows, spending = read_back(writer)
    content = {**facts, **figures(rows, settings.reported_apart, facts["block_size"])}
    check_tau(content, settings.min_tau)
    made = {**provenance(watch), "timings": timings(spending)}
    return writer.finish(make_card("evaluate", writer.plan, writer.all_records(), content, made))
