"""What the card of a completions set says beside its parts: where every row went, and what the answers are like."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from draftmill.contracts.cards import Card, PartRecord
from draftmill.generate.figures import AnswerFigures
from draftmill.generate.gate import aside_of
from draftmill.generate.plan import Blueprint


def content_of(blueprint: Blueprint, records: Sequence[PartRecord]) -> dict[str, Any]:
    """The room's own figures; `rows_in` = `rows` + `set_aside` + `dropped` + `failed`, each listed by reason."""
    figures = AnswerFigures.total(AnswerFigures.read(record.stats) for record in records)
    aside = aside_of(records)
    manner = blueprint.manner
    return {
        **figures.as_content(),
        "set_aside": dict(sorted(aside.items())),
        "failed": dict(sorted(Counter(drop.reason for record in records for drop in record.failed).items())),
        "failed_rows": msgspec.to_builtins([drop for record in records for drop in record.failed]),
        "prompt_sets": [
            {
                "name": file.file.key,
                "bytes": file.file.size,
                "identity": file.file.identity,
                "rows": rows,
                "licence": blueprint.licences.get(file.file.key),
            }
            for file, rows in zip(blueprint.survey.files, blueprint.survey.rows_of_file, strict=True)
        ],
        "split": blueprint.settings.split,
        "rows_of_other_split": blueprint.survey.num_other,
        "thinking": {True: "on", False: "off", None: "as the target likes"}[manner.thinks],
        "tokenizer_hash": manner.chat.tokenizer_hash,
        "template_hash": manner.chat.template_hash,
    }


def licences_on(card: Card) -> dict[str, str]:
    """The licences that a card names, by prompt set."""
    return {entry["name"]: entry["licence"] for entry in card.content["prompt_sets"] if entry["licence"]}


def tell(records: Sequence[PartRecord]) -> None:
    """Shows people where every row went."""
    aside = aside_of(records)
    kinds = {
        "set aside": aside,
        "dropped": Counter(drop.reason for record in records for drop in record.dropped),
        "failed": Counter(drop.reason for record in records for drop in record.failed),
    }
    lines = [f"{sum(record.rows_in for record in records):>12,} rows in", f"{sum(r.rows for r in records):>12,} ok"]
    for kind, reasons in kinds.items():
        told = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common())
        lines.append(f"{reasons.total():>12,} {kind}{f' ({told})' if told else ''}")
    sys.stderr.write("\n".join(lines) + "\n")
