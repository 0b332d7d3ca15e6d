"""The gate keeps what can be learnt from, lists the rest, and refuses a set or a mask that will not do."""

from pathlib import Path
from typing import Any

import pytest

from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import DataGateError, InputError, RecipeError
from draftmill.settings.train import TrainSettings
from draftmill.storage.waiting import StalledError
from draftmill.train.gate import MIN_JUDGED, Findings, GatedSamples, Vocabulary, check_tokenizer, gate, vocabulary_of
from draftmill.train.samples import SampleSet
from sample_sets import GivenSample, Producer, open_samples, write_samples
from tiny import IM_END_ID, VOCAB_SIZE, write_tiny_tokenizer

VOCABULARY = Vocabulary(num_rows=20, reserved=frozenset({1}), tokenizer_ids=frozenset(range(18)))
GOOD: GivenSample = ("good", [2, 3, 4, 5], [False, True, True, True])


def judged(
    folder: Path,
    samples: list[GivenSample],
    vocabulary: Vocabulary = VOCABULARY,
    window: int | None = None,
    **settings: Any,
) -> GatedSamples:
    url = write_samples(folder, samples, "hash", num_parts=1)
    chosen = TrainSettings(input=url, output=("out",), target="t", **{"max_dropped_frac": 1.0, **settings})
    return gate(SampleSet(open_samples(url)), vocabulary, chosen, window)


def gated(folder: Path, samples: list[GivenSample], **settings: Any) -> Findings:
    return judged(folder, samples, **settings).first(1)


def test_kept_samples_know_their_length_and_their_anchor_positions(tmp_path: Path) -> None:
    two: GivenSample = ("two", [2] * 6, [True, True, False, True, False, True])
    found = gated(tmp_path, [GOOD, two])
    assert [(s.index, s.length, s.num_eligible) for s in found.kept] == [(0, 4, 2), (1, 6, 1)]
    assert found.num_tokens == 10
    assert judged(tmp_path, [GOOD, two]).seen_ids() == (2, 3, 4, 5)


def test_supervision_never_runs_on_into_the_next_sample(tmp_path: Path) -> None:
    last: GivenSample = ("last", [2, 3], [False, True])
    first: GivenSample = ("first", [2, 3], [True, False])
    found = gated(tmp_path, [last, first, GOOD])
    assert [(d.id, d.reason) for d in found.dropped] == [
        ("last", "no anchor position"),
        ("first", "no anchor position"),
    ]


def test_samples_that_cannot_be_trained_on_are_listed_with_file_line_and_reason(tmp_path: Path) -> None:
    masked: GivenSample = ("masked", [2, 19, 3], [True] * 3)
    late: GivenSample = ("late", [2] * 9, [False] * 7 + [True] * 2)
    found = gated(tmp_path, [GOOD, masked, GOOD, GOOD, late], mask_id=19, max_tokens=8)
    assert [(d.file, d.line, d.id, d.reason) for d in found.dropped] == [
        ("part-00000.arrow", 2, "masked", "holds the mask token"),
        ("part-00000.arrow", 5, "late", "no anchor position within its first 8 tokens"),
    ]


def test_a_sample_longer_than_a_row_is_cut_flagged_and_kept_where_anchors_remain(tmp_path: Path) -> None:
    long: GivenSample = ("long", [2] * 9, [False] * 5 + [True] * 4)
    beyond: GivenSample = ("beyond", [2] * 9 + [19], [True] * 10)
    found = gated(tmp_path, [long, GOOD, beyond], mask_id=19, max_tokens=8)
    # Of the supervised positions 5 .. 8 the cut leaves 5, 6, 7, and 7 has no successor within the row.
    assert [(s.length, s.num_eligible, s.is_cut) for s in found.kept] == [(8, 2, True), (4, 2, False), (8, 7, True)]
    assert (found.num_cut, found.num_tokens, found.dropped) == (2, 20, ())


def test_a_sample_longer_than_the_targets_window_is_cut_there_though_a_row_may_hold_more(tmp_path: Path) -> None:
    long: GivenSample = ("long", [2] * 9, [False] * 3 + [True] * 6)
    late: GivenSample = ("late", [2] * 9, [False] * 6 + [True] * 3)
    # One set, asked about with and without a window: what is remembered of it is remembered for its bound.
    for window, kept in ((None, [(9, 5), (9, 2)]), (20, [(9, 5), (9, 2)]), (6, [(6, 2)])):
        found = judged(tmp_path / str(window), [long, late], window=window, max_tokens=12)
        assert [(s.length, s.num_eligible) for s in found.first(1).kept] == kept
        assert found.first(1).num_cut == (window == 6)
    dropped = judged(tmp_path / "again", [long, late], window=6, max_tokens=12).first(1).dropped
    assert [row.reason for row in dropped] == ["no anchor position within its first 6 tokens"]


def test_the_mask_is_the_first_row_that_the_tokenizer_leaves_whatever_is_in_the_data(tmp_path: Path) -> None:
    used: GivenSample = ("used", [2, 18, 3], [True] * 3)
    assert judged(tmp_path / "a", [GOOD]).rule.mask_id == 18
    assert judged(tmp_path / "b", [GOOD, used]).rule.mask_id == 18
    assert [row.reason for row in gated(tmp_path / "c", [GOOD, used]).dropped] == ["holds the mask token"]


def test_where_the_tokenizer_uses_every_row_the_mask_is_the_first_that_the_data_leave(tmp_path: Path) -> None:
    full = Vocabulary(num_rows=6, reserved=frozenset({0}), tokenizer_ids=frozenset(range(6)))
    assert judged(tmp_path / "a", [GOOD], full).rule.mask_id == 1
    every: GivenSample = ("every", [1, 2, 3, 4, 5], [True] * 5)
    with pytest.raises(DataGateError, match="no embedding row is left"):
        judged(tmp_path / "b", [every], full)


@pytest.mark.parametrize(("mask_id", "says"), [(1, "pad, eos or bos"), (20, "outside the target's embedding of 20")])
def test_a_mask_that_is_reserved_or_outside_the_table_is_refused(tmp_path: Path, mask_id: int, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        gated(tmp_path, [GOOD], mask_id=mask_id)


def test_a_mask_that_occurs_in_much_of_the_data_is_refused_with_the_figures(tmp_path: Path) -> None:
    with pytest.raises(DataGateError, match=r"none of 2 .*: holds the mask token: 2"):
        gated(tmp_path / "all", [GOOD, GOOD], mask_id=3)
    other: GivenSample = ("other", [6, 7, 8], [True] * 3)
    with pytest.raises(DataGateError, match=r"1 of 2 .*--max-dropped-frac 0.1.*another --mask-id"):
        gated(tmp_path / "half", [GOOD, other], mask_id=3, max_dropped_frac=0.1)


def test_a_set_without_any_anchor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataGateError, match=r"none of 2 samples .* no anchor position: 2"):
        gated(tmp_path, [("a", [2, 3], [False, True]), ("b", [2, 3, 4], [True, False, True])])


@pytest.mark.parametrize(("token_ids", "says"), [([2, 20], "2 … 20"), ([5, -1], "-1 … 5")])
def test_ids_that_the_embedding_does_not_have_are_refused(tmp_path: Path, token_ids: list[int], says: str) -> None:
    with pytest.raises(InputError, match=rf"part-00000\.arrow holds token ids {says}, .* 20 rows"):
        gated(tmp_path, [GOOD, ("a", token_ids, [True, True])])


def test_another_tokenizer_than_the_targets_is_refused(tmp_path: Path) -> None:
    chat = open_chat(write_tiny_tokenizer(tmp_path / "target"))
    mine = open_samples(write_samples(tmp_path / "mine", [GOOD], chat.tokenizer_hash, 1))
    check_tokenizer(mine, chat, tmp_path / "target")
    other = open_samples(write_samples(tmp_path / "other", [GOOD], "0" * 64, 1))
    with pytest.raises(InputError, match="another tokenizer"):
        check_tokenizer(other, chat, tmp_path / "target")


def test_the_vocabulary_is_read_without_loading_the_target(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "config.json").write_text(f'{{"text_config": {{"vocab_size": {VOCAB_SIZE}, "eos_token_id": [7, 9]}}}}')
    found = vocabulary_of(folder, open_chat(folder))
    assert found.num_rows == VOCAB_SIZE
    assert {7, 9, IM_END_ID} <= found.reserved
    assert max(found.tokenizer_ids) == 260
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    with pytest.raises(InputError, match=r"config\.json says no vocab_size"):
        vocabulary_of(folder, open_chat(folder))


def unfinished(folder: Path, samples: list[GivenSample], vocabulary: Vocabulary = VOCABULARY) -> GatedSamples:
    """A set of two parts, of which only the first is there."""
    Producer(folder, samples, "hash", num_parts=2).publish(0)
    chosen = TrainSettings(input=str(folder), output=("out",), target="t", num_steps=1)
    return gate(SampleSet(open_samples(folder)), vocabulary, chosen, None)


def test_a_part_of_an_unfinished_set_is_refused_by_its_name_once_it_is_needed(tmp_path: Path) -> None:
    masked: list[GivenSample] = [("m", [2, 18, 3], [True] * 3)] * 3
    good = [GOOD] * (2 * MIN_JUDGED - 3)
    gated = unfinished(tmp_path, [*masked, *good])
    with pytest.raises(StalledError, match=r"part-00001 of .* is awaited since"):
        gated.kept(1)
    with pytest.raises(DataGateError, match=r"3 of 20 samples of part-00000\.arrow of .*holds the mask token: 3"):
        gated.kept(0)


def test_a_small_part_is_refused_only_where_nothing_of_it_is_left(tmp_path: Path) -> None:
    masked: GivenSample = ("m", [2, 18, 3], [True] * 3)
    Producer(tmp_path, [GOOD, masked, masked, masked], "hash", num_parts=2).publish(0, 1)
    chosen = TrainSettings(input=str(tmp_path), output=("out",), target="t", num_steps=1)
    found = gate(SampleSet(open_samples(tmp_path)), VOCABULARY, chosen, None)
    assert [sample.index for sample in found.kept(0)] == [0]
    with pytest.raises(DataGateError, match=r"none of 2 samples of part-00001\.arrow"):
        found.kept(1)


def test_an_unfinished_set_cannot_tell_which_row_its_data_will_leave(tmp_path: Path) -> None:
    full = Vocabulary(num_rows=6, reserved=frozenset({0}), tokenizer_ids=frozenset(range(6)))
    with pytest.raises(RecipeError, match=r"is unfinished, and the tokenizer names all 6 rows .* with --mask-id"):
        unfinished(tmp_path, [GOOD, GOOD], full)
