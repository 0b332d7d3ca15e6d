"""What is counted of a tokenized set: summable over parts, and the shares and percentiles derived from it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from draftmill.contracts.cards import PartRecord
from draftmill.contracts.percentiles import percentiles

PERCENTILES = (5, 50, 95)


class PartStats(msgspec.Struct, kw_only=True):
    """Counts of rows, samples and tokens; the two histograms map a number of tokens to a number of samples."""

    rows: int = 0
    """Rows read, dropped ones included."""
    dropped: int = 0
    """Rows dropped for any reason but a repeated id."""
    duplicate_rows: int = 0
    """Rows dropped because an earlier row has their id."""
    samples: int = 0
    duplicate_samples: int = 0
    """Samples with exactly the token ids of an earlier one in the same part: counted by who has the whole part."""
    thinking_rows: int = 0
    """Rows with samples whose answers hold reasoning."""
    answers: int = 0
    """Of the target's own, in rows with samples."""
    answers_unsupervised: int = 0
    """Those of them that no sample supervises: in the text as history, behind a prompt that the target did not see."""
    with_mask: int = 0
    """Samples that hold the drafter's mask token, where that is known: train drops them."""
    differing: int = 0
    """Rows, of those that were checked, that the fast engine and the reference made different samples of."""
    truncated: int = 0
    """Samples cut at max_tokens."""
    tokens: int = 0
    supervised: int = 0
    """Tokens that the target generated, in samples."""
    supervised_counts: dict[int, int] = msgspec.field(default_factory=dict)
    length_counts: dict[int, int] = msgspec.field(default_factory=dict)

    @property
    def supervised_frac(self) -> float:
        """Share of all tokens that is supervised."""
        return self.supervised / max(self.tokens, 1)

    @property
    def thinking_frac(self) -> float:
        """Share of the rows that were kept whose answers hold reasoning."""
        return self.thinking_rows / max(self.rows - self.dropped - self.duplicate_rows, 1)

    @property
    def answers_unsupervised_frac(self) -> float:
        """Share of the answers that no sample supervises."""
        return self.answers_unsupervised / max(self.answers, 1)

    @property
    def truncated_frac(self) -> float:
        """Share of samples cut at max_tokens."""
        return self.truncated / max(self.samples, 1)

    def spike(self, largest: int) -> tuple[int, float]:
        """The commonest number of supervised tokens that is at most `largest`, and the share of samples with it."""
        small = {n: count for n, count in self.supervised_counts.items() if n <= largest}
        number = max(small, key=lambda n: (small[n], -n), default=0)
        return number, small.get(number, 0) / max(self.samples, 1)


def count(
    lengths: NDArray[np.int32], supervised: NDArray[np.int32], truncated: NDArray[np.bool_], **rows: int
) -> PartStats:
    """What there is to count of samples by their numbers of tokens, with the caller's counts of rows."""
    return PartStats(
        samples=len(lengths),
        truncated=int(np.count_nonzero(truncated)),
        tokens=int(lengths.sum(dtype=np.int64)),
        supervised=int(supervised.sum(dtype=np.int64)),
        supervised_counts=_histogram(supervised),
        length_counts=_histogram(lengths),
        **rows,
    )


def _histogram(numbers: NDArray[np.int32]) -> dict[int, int]:
    values, counts = np.unique(numbers, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def fingerprint(input_ids: NDArray[np.int32]) -> int:
    """64 bits that tell a sample's ids from any other's."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(input_ids).data)


def holding(input_ids: NDArray[np.int32], lengths: NDArray[np.int32], token_id: int | None) -> int:
    """How many of the samples that lie in `input_ids` one after the other hold the token."""
    if token_id is None:
        return 0
    places = np.flatnonzero(input_ids == token_id)
    return len(np.unique(np.searchsorted(np.cumsum(lengths, dtype=np.int64), places, side="right")))


def repeats(fingerprints: NDArray[np.uint64]) -> int:
    """How many samples have the ids of an earlier one."""
    return len(fingerprints) - len(np.unique(fingerprints))


def figures_of(record: PartRecord) -> PartStats:
    """The figures that a part's record carries."""
    return msgspec.convert(record.stats, PartStats, str_keys=True)


def total(parts: Iterable[PartStats]) -> PartStats:
    """The figures of all parts together."""
    sums, counts = Counter[str](), defaultdict[str, Counter[int]](Counter)
    for part in parts:
        for name in PartStats.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, dict):
                counts[name].update(value)
            else:
                sums[name] += value
    histograms = {name: dict(sorted(counted.items())) for name, counted in counts.items()}
    whole: dict[str, Any] = {**sums, **histograms}
    return PartStats(**whole)


def bins(counts: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """The histogram in bins that double: (from, to inclusive, samples), from the first to the last one in use."""
    by_bit = Counter[int]()
    for number, count in counts.items():
        by_bit[number.bit_length()] += count
    span = range(min(by_bit), max(by_bit) + 1) if by_bit else range(0)
    return [(1 << b >> 1, max((1 << b) - 1, 0), by_bit[b]) for b in span]


def as_content(figures: PartStats) -> dict[str, Any]:
    """The figures as a card tells them."""
    return {
        "samples": figures.samples,
        "supervised_tokens": figures.supervised,
        "supervised_frac": round(figures.supervised_frac, 4),
        "supervised_per_sample": percentiles(figures.supervised_counts, PERCENTILES),
        "supervised_histogram": [{"from": a, "to": b, "samples": n} for a, b, n in bins(figures.supervised_counts)],
        "length_per_sample": percentiles(figures.length_counts, PERCENTILES),
        "truncated_frac": round(figures.truncated_frac, 4),
        "thinking_rows": figures.thinking_rows,
        "thinking_frac": round(figures.thinking_frac, 4),
        "answers": figures.answers,
        "answers_unsupervised": figures.answers_unsupervised,
        "answers_unsupervised_frac": round(figures.answers_unsupervised_frac, 4),
        "duplicate_rows": figures.duplicate_rows,
        "duplicate_samples": figures.duplicate_samples,
        "samples_with_mask_id": figures.with_mask,
        "rows_that_differed": figures.differing,
    }
