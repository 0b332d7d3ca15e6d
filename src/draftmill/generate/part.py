"""One part in the making: its rows arrive batch by batch, in any order, and are written in the order of the prompts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from draftmill.chat.chat import Chat
from draftmill.contracts.cards import Dropped, PartRecord
from draftmill.contracts.rows import Row, encode_row
from draftmill.generate.conversation import Conversation
from draftmill.generate.prompts import PromptPart
from draftmill.storage.store import sha256_of

Batch = list[Conversation]


@dataclass(frozen=True)
class Limits:
    """How prompts become batches, and what a prompt and an answer may be."""

    max_prompt_tokens: int
    max_new_tokens: int
    batch_rows: int
    keeps_cut: bool


@dataclass
class OpenPart:
    """A part whose conversations are rendered and cut into batches; `num_left` batches are still to be answered."""

    source: PromptPart
    conversations: list[Conversation]
    batches: list[Batch]
    num_left: int

    def record(self, plan: str, sampling: dict[str, Any]) -> tuple[PartRecord, bytes]:
        """The record and the data of the part, all of its batches answered."""
        assert self.num_left == 0, "a part is written whole"
        rows = [c.row(sampling) for c in self.conversations if c.dropped is None]
        data = b"".join(map(encode_row, rows))
        dropped = (*self.source.dropped, *(c.dropped for c in self.conversations if c.dropped is not None))
        figures = AnswerFigures.of(rows)
        record = PartRecord(
            name=self.source.name,
            file=f"{self.source.name}.jsonl",
            rows_in=len(rows) + len(dropped),
            rows=len(rows),
            tokens=figures.completion_tokens,
            bytes=len(data),
            sha256=sha256_of(data),
            plan=plan,
            stats=figures.as_stats(),
            dropped=tuple(sorted(dropped, key=_place)),
        )
        return record, data


def open_part(source: PromptPart, chat: Chat, limits: Limits) -> OpenPart:
    """Renders the prompts of a part and cuts them into batches, of like lengths so that little is padding."""
    conversations = [Conversation(prompt, chat, limits.max_prompt_tokens) for prompt in source.prompts]
    waiting = [c for c in conversations if c.prompt_ids is not None]
    waiting.sort(key=lambda c: len(c.prompt_ids or ()))  # stable: equal lengths keep the order of the input
    batches = list(_chunks(waiting, limits.batch_rows))
    return OpenPart(source, conversations, batches, num_left=len(batches))


def _chunks(waiting: list[Conversation], size: int) -> Iterator[Batch]:
    for start in range(0, len(waiting), size):
        yield waiting[start : start + size]


def _place(drop: Dropped) -> tuple[str, int]:
    return drop.file, drop.line


@dataclass(frozen=True)
class AnswerFigures:
    """Sums over answers, of one part or of many; `lengths` counts answers by their tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, rows: list[Row]) -> "AnswerFigures":
        """The figures of some rows."""
        answers = [m for row in rows for m in row.messages if m["role"] == "assistant"]
        return cls(
            prompt_tokens=sum(len(m["prompt_token_ids"]) for m in answers),
            completion_tokens=sum(len(m["token_ids"]) for m in answers),
            finish_reasons=Counter(row.finish_reason or "" for row in rows),
            lengths=Counter(len(m["token_ids"]) for m in answers),
        )

    @classmethod
    def read(cls, stats: dict[str, Any]) -> "AnswerFigures":
        """The figures a part record holds."""
        lengths = Counter({int(length): count for length, count in stats["lengths"].items()})
        return cls(stats["prompt_tokens"], stats["completion_tokens"], Counter(stats["finish_reasons"]), lengths)

    def __add__(self, other: "AnswerFigures") -> "AnswerFigures":
        return AnswerFigures(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.finish_reasons + other.finish_reasons,
            self.lengths + other.lengths,
        )

    def as_stats(self) -> dict[str, Any]:
        """The figures as a part record keeps them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": dict(self.finish_reasons),
            "lengths": {str(length): count for length, count in sorted(self.lengths.items())},
        }

    def as_content(self) -> dict[str, Any]:
        """The figures as a card shows them, lengths of answers in tokens."""
        quantiles = {f"p{percent}": self.length_at(percent / 100) for percent in (50, 95)}
        lengths = {**quantiles, "max": max(self.lengths, default=0)}
        return {**self.as_stats(), "lengths": lengths}

    def length_at(self, frac: float) -> int:
        """The shortest length that at least `frac` of the answers do not exceed; 0 without answers."""
        wanted, passed = frac * self.lengths.total(), 0
        for length, count in sorted(self.lengths.items()):
            passed += count
            if passed >= wanted:
                return length
        return 0
