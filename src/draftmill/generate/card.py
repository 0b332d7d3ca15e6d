"""What the card of a completions set says beside its parts: where every row went, and what the answers are like."""

import sys
from collections.abc import Sequence
from typing import Any

from draftmill.contracts.cards import Card, PartRecord, count_reasons, told_reasons
from draftmill.generate.figures import AnswerFigures
from draftmill.generate.gate import EMPTY_REASONS, aside_of
from draftmill.generate.plan import Blueprint


def content_of(blueprint: Blueprint, records: Sequence[PartRecord]) -> dict[str, Any]:
    """The room's own figures; `rows_in` = `rows` + `set_aside` + `dropped` + `failed`, each listed by reason."""
    figures = AnswerFigures.total(AnswerFigures.read(record.stats) for record in records)
    failed = [drop for record in records for drop in record.failed]
    manner = blueprint.manner
    return {
        **figures.as_content(),
        "set_aside": aside_of(records),
        "empty_frac": round(sum(aside_of(records)[r] for r in EMPTY_REASONS) / sum(r.rows_in for r in records), 6),
        "failed": count_reasons(failed),
        "failed_rows": failed,
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
    kinds = {
        "set aside": aside_of(records),
        "dropped": count_reasons(drop for record in records for drop in record.dropped),
        "failed": count_reasons(drop for record in records for drop in record.failed),
    }
    lines = [f"{sum(record.rows_in for record in records):>12,} rows in", f"{sum(r.rows for r in records):>12,} ok"]
    for kind, reasons in kinds.items():
        lines.append(f"{reasons.total():>12,} {kind}{f' ({told_reasons(reasons)})' if reasons else ''}")
    if differing := AnswerFigures.total(AnswerFigures.read(record.stats) for record in records).prompt_differs:
        lines.append(
            f"{differing:>12,} answers were given to another prompt than the template here prints: where the engine "
            "returns its ids, training data are what it read; see that --tokenizer and the engine share a template"
        )
    sys.stderr.write("\n".join(lines) + "\n")
