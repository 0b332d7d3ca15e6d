"""The gate refuses what would teach nothing, naming figure, threshold and flag; it lets good sets pass."""

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from draftmill.contracts.errors import DataGateError
from draftmill.settings.tokenize import GateSettings
from draftmill.tokenize.figures import PartStats, bins, count, fingerprint, holding, repeats, total
from draftmill.tokenize.gate import advise, judge
from draftmill.tokenize.histogram import histogram, show, summary
from draftmill.tokenize.picture import picture


def _figures(supervised: list[int], prompt: int = 20, **rows: int) -> PartStats:
    counts, cut = np.array(supervised, np.int32), np.zeros(len(supervised), np.bool_)
    return count(counts + np.int32(prompt), counts, cut, **{"rows": len(supervised), **rows})


FINGERPRINT_OF_NINE = 17920761729237176734
VARIED = list(range(17, 97))


def test_the_set_with_six_supervised_tokens_in_87_of_100_samples_is_refused():
    with pytest.raises(DataGateError, match=r"87\.0% of 100 samples have exactly 6 .*at most 20\.0%.*--max-spike-frac"):
        judge(_figures([6] * 87 + VARIED[:13]), GateSettings(), "the set")


def test_a_spike_at_the_generation_s_cap_is_no_fault():
    judge(_figures([80] * 90 + VARIED[:10]), GateSettings(), "the set")
    with pytest.raises(DataGateError, match="exactly 80"):
        judge(_figures([80] * 90 + VARIED[:10]), GateSettings(spike_tokens=80), "the set")


@pytest.mark.parametrize(
    ("figures", "words", "cure"),
    [
        (
            _figures(VARIED, prompt=2000),
            r"[23]\.\d% of \d+,\d+ tokens are supervised.*5\.0%: --min",
            "min_supervised_frac",
        ),
        (_figures(VARIED, rows=100, dropped=20), r"20\.0% of 100 rows were dropped.*10\.0%: --max", "max_dropped_frac"),
        (_figures(VARIED, rows=90, duplicate_rows=10), r"11\.1% of 90 rows repeat the id.*--max", "max_duplicate_frac"),
    ],
)
def test_each_fault_is_named_with_its_flag_and_the_flag_overrides_it(figures: PartStats, words: str, cure: str):
    with pytest.raises(DataGateError, match=words) as refusal:
        judge(figures, GateSettings(), "the set")
    assert f"--{cure.replace('_', '-')}" in str(refusal.value)
    allowed: dict[str, Any] = {cure: 0 if cure.startswith("min") else 1}
    judge(figures, GateSettings(**allowed), "the set")


def test_repeated_tokens_are_duplicates():
    figures = _figures(VARIED[:40])
    ids = [np.arange(number // 2, 60, dtype=np.int32) for number in range(40)]
    figures.duplicate_samples = repeats(np.array(list(map(fingerprint, ids)), np.uint64))
    with pytest.raises(DataGateError, match=r"50\.0% of 40 samples repeat the tokens"):
        judge(figures, GateSettings(), "the set")


def test_a_fingerprint_tells_ids_apart_and_is_the_same_everywhere():
    ids = np.arange(9, dtype=np.int32)
    assert fingerprint(ids) == fingerprint(np.arange(18, dtype=np.int32)[:9]) == FINGERPRINT_OF_NINE
    assert len({fingerprint(ids[:n]) for n in range(10)}) == 10 and fingerprint(ids) != fingerprint(ids[::-1])


def test_a_handful_of_rows_is_shown_but_not_judged():
    judge(_figures([6] * 19), GateSettings(), "the set")
    with pytest.raises(DataGateError):
        judge(_figures([6] * 20), GateSettings(), "the set")


def test_figures_of_parts_add_up():
    parts = [_figures([6, 6, 30], dropped=1, rows=4), _figures([6, 40], duplicate_rows=2, rows=4)]
    whole = total(parts)
    assert (whole.rows, whole.dropped, whole.duplicate_rows, whole.samples) == (8, 1, 2, 5)
    assert whole.supervised_counts == {6: 3, 30: 1, 40: 1}
    assert whole.tokens == sum(n * count for n, count in whole.length_counts.items()) == 5 * 20 + 88
    assert whole.spike(16) == (6, 0.6)


def test_bins_double():
    counts = {0: 1, 1: 2, 6: 87, 80: 10}
    assert bins(counts) == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 3, 0),
        (4, 7, 87),
        (8, 15, 0),
        (16, 31, 0),
        (32, 63, 0),
        (64, 127, 10),
    ]
    assert bins({}) == []


def test_the_histogram_shows_the_spike():
    text = histogram(_figures([6] * 87 + VARIED[:13]), "the set")
    assert "100 samples" in text.splitlines()[0]
    (spike,) = [line for line in text.splitlines() if "4-7" in line]
    assert "█" * 40 in spike and spike.endswith("87.0%  87.0% at exactly 6")
    assert len(text.splitlines()) == 1 + len(bins(_figures([6, *VARIED[:13]]).supervised_counts))


def test_a_mask_token_in_the_data_is_counted_by_sample_and_refused_where_it_is_everywhere():
    ids, lengths = np.array([1, 9, 9, 2, 3, 9, 4], np.int32), np.array([3, 2, 2], np.int32)
    assert [holding(ids, lengths, token) for token in (9, 1, 3, 7, None)] == [2, 1, 1, 0, 0]
    figures = _figures(VARIED)
    figures.with_mask = 8
    judge(figures, GateSettings(), "the set")
    figures.with_mask = 9
    with pytest.raises(DataGateError, match=r"11\.2% of 80 samples hold the mask token.*--mask-id"):
        judge(figures, GateSettings(), "the set")


def test_the_summary_tells_each_figure_there_is(capsys: pytest.CaptureFixture[str]):
    figures = _figures(VARIED, rows=100, dropped=10, duplicate_rows=10)
    figures.thinking_rows, figures.with_mask, figures.duplicate_samples, figures.truncated = 40, 1, 2, 4
    show(figures, "the set")
    shown = capsys.readouterr().err
    for words in (
        "50.0% of the rows with reasoning",
        "10 of 100 rows dropped",
        "10 rows repeat an id",
        "4 samples cut",
    ):
        assert words in shown
    assert "1 samples hold the mask token (1.2%)" in shown and "tokens per sample: min 37" in shown
    assert "cut" not in summary(_figures(VARIED)) and "reasoning" not in summary(_figures(VARIED))


def test_answers_that_are_history_alone_are_told_with_what_would_keep_them(capsys: pytest.CaptureFixture[str]):
    figures = _figures(VARIED, answers=1200, answers_unsupervised=121)
    assert "  121 of 1,200 answers are history alone, not supervised (10.1%)" in summary(figures)
    assert "history" not in summary(_figures(VARIED, answers=1200))
    for turns in ("faithful", "last"):
        advise(figures, turns)
        shown = capsys.readouterr().err
        assert f"--turns {turns} trains on none of these 121 answers; --turns expand" in shown
    for turns in ("expand", "all", None):
        advise(figures, turns)
    advise(_figures(VARIED, answers=1200, answers_unsupervised=120), "faithful")
    advise(_figures([]), "faithful")
    assert capsys.readouterr().err == ""
    judge(figures, GateSettings(), "the set")


def test_the_picture_is_svg_with_a_bar_a_bin_and_the_same_bytes_always():
    figures = _figures([6] * 87 + VARIED[:13])
    drawn = picture(figures, "tokenize <s3://bucket> & more")
    assert drawn == picture(figures, "tokenize <s3://bucket> & more")
    root = ElementTree.fromstring(drawn)
    bars = [bar for bar in root if bar.tag.endswith("rect") and bar.get("class") == "supervised"]
    assert len(bars) == len(bins(figures.supervised_counts))
    assert "tokenize <s3://bucket> & more" in [text.text for text in root] and "87.0%" in [text.text for text in root]
