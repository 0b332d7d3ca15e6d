"""What is counted of answers: sums over one row, a part, or a set."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from draftmill.contracts.percentiles import percentiles
from draftmill.generate.answers import Answer

_PERCENTILES = (50, 95)


class AnswerFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums; `lengths` counts answers by their tokens, `finish_reasons` rows by how their last answer ended."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    with_thinking: int = 0
    with_engine_ids: int = 0
    prompt_differs: int = 0
    """Answers whose engine read another prompt than the local template prints."""
    finish_reasons: dict[str, int] = {}
    lengths: dict[int, int] = {}

    @classmethod
    def of(cls, answers: list[Answer], num_differing: int) -> "AnswerFigures":
        """The figures of one row."""
        return cls(
            answers=len(answers),
            prompt_tokens=sum(a.num_prompt_tokens for a in answers),
            completion_tokens=sum(a.num_tokens for a in answers),
            with_thinking=sum(bool((a.reasoning or "").strip()) for a in answers),
            with_engine_ids=sum(a.token_ids is not None for a in answers),
            prompt_differs=num_differing,
            finish_reasons={answers[-1].finish_reason: 1} if answers else {},
            lengths=dict(Counter(a.num_tokens for a in answers)),
        )

    @classmethod
    def total(cls, all_figures: Iterable["AnswerFigures"]) -> "AnswerFigures":
        """Their sum."""
        sums: Counter[str] = Counter()
        finish_reasons: Counter[str] = Counter()
        lengths: Counter[int] = Counter()
        for one in all_figures:
            finish_reasons.update(one.finish_reasons)
            lengths.update(one.lengths)
            sums.update({name: value for name, value in msgspec.structs.asdict(one).items() if isinstance(value, int)})
        ordered = {"finish_reasons": dict(sorted(finish_reasons.items())), "lengths": dict(sorted(lengths.items()))}
        return cls(**sums, **ordered)

    @classmethod
    def read(cls, stats: dict[str, Any]) -> "AnswerFigures":
        """The figures a part record holds."""
        return msgspec.convert(stats, cls, strict=False)  # JSON has text for the keys of `lengths`

    def as_stats(self) -> dict[str, Any]:
        """The figures as a part record keeps them."""
        return msgspec.to_builtins(self, str_keys=True)

    def as_content(self) -> dict[str, Any]:
        """The figures as a card shows them: shares of the answers (of rows: finish reasons), lengths in tokens."""
        rows = sum(self.finish_reasons.values())
        return {
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self.finish_reasons,
            "finish_reason_fracs": {reason: _frac(count, rows) for reason, count in self.finish_reasons.items()},
            "thinking_frac": _frac(self.with_thinking, self.answers),
            "engine_ids_frac": _frac(self.with_engine_ids, self.answers),
            "prompt_differs": self.prompt_differs,
            "lengths": percentiles(self.lengths, _PERCENTILES),
        }


def _frac(count: int, total: int) -> float:
    return round(count / total, 6) if total else 0.0
