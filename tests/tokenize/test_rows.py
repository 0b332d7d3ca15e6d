"""A chunk of lines becomes columns: the samples of the rows in order, and every row that gives none listed with why."""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from completions import row
from draftmill.chat.chat import open_chat
from draftmill.chat.skeletons import Skeletons
from draftmill.chat.turns import RenderedTurns
from draftmill.settings.tokenize import Turns
from draftmill.tokenize.encoders import Encoded, Encoder
from draftmill.tokenize.figures import repeats
from draftmill.tokenize.rows import CHECKED_EVERY, RowBatch, RowMaker, RowMakerSpec
from tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RowMakerSpec:
    return RowMakerSpec(write_tiny_tokenizer(tmp_path_factory.mktemp("t"), thinking=True), "faithful", 40)


def _lines(rows: list[dict[str, Any] | bytes]) -> list[tuple[int, bytes]]:
    return [(7 + i, r if isinstance(r, bytes) else json.dumps(r).encode()) for i, r in enumerate(rows)]


def _split(batch: RowBatch) -> list[tuple[str, list[int], list[bool], bool]]:
    ends = np.cumsum(batch.lengths)
    ids, masks = np.split(batch.input_ids, ends)[:-1], np.split(batch.loss_mask, ends)[:-1]
    columns = zip(batch.sample_ids, ids, masks, batch.truncated.tolist(), strict=True)
    return [(name, i.tolist(), m.tolist(), cut) for name, i, m, cut in columns]


ROWS: list[dict[str, Any] | bytes] = [
    row(0),
    b'{"id": "torn", "messages": [',
    {"id": "silent", "messages": [{"role": "user", "content": "hi"}]},
    row(20),
    row(1),
    row(0),
]


def test_the_columns_hold_what_each_row_gives(spec: RowMakerSpec):
    batch = RowMaker(spec).make(_lines(ROWS), "a.jsonl")

    alone = RowMaker(spec)
    expected = [sample for line in _lines(ROWS) for sample in _split(alone.make([line], "a.jsonl"))]
    assert _split(batch) == expected and [s[0] for s in expected] == ["row-0", "row-20", "row-1", "row-0"]
    assert [d for *_, d in expected] == [False, True, False, False]
    assert (batch.input_ids.dtype, batch.loss_mask.dtype, batch.lengths.dtype) == (np.int32, np.bool_, np.int32)


def test_every_row_is_kept_or_listed(spec: RowMakerSpec):
    batch = RowMaker(spec).make(_lines(ROWS), "a.jsonl")
    listed = [(drop.file, drop.line, drop.id, drop.reason) for drop in batch.dropped]
    assert listed == [("a.jsonl", 8, None, "broken JSON"), ("a.jsonl", 9, "silent", "no assistant turn")]
    assert (len(batch.row_ids), batch.stats.rows, batch.stats.dropped, batch.stats.samples) == (6, 6, 2, 4)
    assert (batch.stats.tokens, batch.stats.supervised) == (len(batch.input_ids), batch.loss_mask.sum())
    assert repeats(batch.fingerprints) == 1


def test_no_line_and_no_sample_are_empty_columns(spec: RowMakerSpec):
    for lines in ([], _lines([b"{"])):
        batch = RowMaker(spec).make(lines, "a.jsonl")
        assert _split(batch) == [] and len(batch.dropped) == len(batch.row_ids) == len(lines)
        assert batch.input_ids.dtype == np.int32 and batch.stats.samples == 0


def test_chunks_make_what_the_whole_makes(spec: RowMakerSpec):
    maker, lines = RowMaker(spec), _lines(ROWS)
    parts = [maker.make(lines[i : i + 2], "a.jsonl") for i in range(0, len(lines), 2)]
    assert [s for part in parts for s in _split(part)] == _split(maker.make(lines, "a.jsonl"))


def test_every_line_tells_its_id_whatever_became_of_it(spec: RowMakerSpec):
    silent = {"id": "silent", "messages": [{"role": "user", "content": "hi"}]}
    who = {"id": "who", "messages": [{"role": "narrator", "content": "x"}]}
    batch = RowMaker(spec).make(_lines([row(0), b"{", silent, who, row(1)]), "a.jsonl")
    assert batch.row_ids == ["row-0", None, "silent", "who", "row-1"]


class _WrongEncoder:
    """Says of every text that its last token is another."""

    def __init__(self, right: Encoder) -> None:
        self._right = right

    def encode(self, texts: Sequence[RenderedTurns]) -> list[Encoded]:
        made = self._right.encode(texts)
        return [Encoded(np.append(ids[:-1], np.int32(5)), mask) for ids, mask in made]


def _numbered(numbers: range) -> list[tuple[int, bytes]]:
    return _lines([{**row(number % 40), "id": f"row-{number}"} for number in numbers])


def test_one_row_in_500_is_made_again_and_what_differs_is_shown_and_counted(
    spec: RowMakerSpec, caplog: pytest.LogCaptureFixture
):
    maker, lines = RowMaker(spec), _numbered(range(2000))
    checked = [line for line in lines if zlib.crc32(json.loads(line[1])["id"].encode()) % CHECKED_EVERY == 0]
    assert 1 <= len(checked) <= 10
    right = maker.make(lines, "a.jsonl")
    assert right.stats.differing == 0 and not caplog.messages

    maker.fast = maker.fast._replace(encoder=_WrongEncoder(maker.fast.encoder))
    wrong = maker.make(lines, "a.jsonl")
    assert wrong.stats.differing == len(checked) == len(caplog.messages)
    assert f"a.jsonl line {checked[0][0]}" in caplog.messages[0] and "List some colours" in caplog.messages[0]
    assert not np.array_equal(wrong.input_ids, right.input_ids)

    careful = maker.make(lines, "a.jsonl", careful=True)
    assert careful.stats.differing == 0
    assert _split(careful) == _split(right)


def test_rows_with_reasoning_and_samples_with_the_mask_token_are_counted(spec: RowMakerSpec):
    user = {"role": "user", "content": "hi"}
    answers: list[dict[str, Any]] = [
        {"content": "ok", "reasoning_content": "why"},
        {"content": "ok", "reasoning_content": " "},
        {"content": "why\n</think>\n\nok"},
        {"content": "ok apple"},
    ]
    rows: list[dict[str, Any] | bytes] = [{"messages": [user, {"role": "assistant", **answer}]} for answer in answers]
    (apple,) = open_chat(spec.tokenizer).encode(" apple")
    stats = RowMaker(dataclasses.replace(spec, mask_id=apple)).make(_lines(rows), "a.jsonl").stats
    assert (stats.samples, stats.thinking_rows, stats.with_mask) == (4, 2, 1)


def _talk(row_id: str, *answers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A question before each answer."""
    turns = [[{"role": "user", "content": f"{row_id} {i}"}, {"role": "assistant", **a}] for i, a in enumerate(answers)]
    return {"id": row_id, "messages": [message for turn in turns for message in turn], **more}


def _thought(number: int) -> dict[str, Any]:
    return {"content": f"ok {number}", "reasoning_content": f"why {number}"}


def _emitted(prompt: list[int]) -> dict[str, Any]:
    return {"content": "?", "prompt_token_ids": prompt, "token_ids": [60, 61, 2]}


@pytest.mark.parametrize(
    ("turns", "unsupervised"), [("faithful", 4 * 2), ("last", 4 * 2 + 1), ("expand", 0), ("all", 0)]
)
def test_answers_that_no_sample_supervises_are_counted_of_kept_skeletons_too(
    spec: RowMakerSpec, turns: Turns, unsupervised: int
):
    alike = [_talk(f"r{i}", _thought(i), _thought(i + 1), _thought(i + 2)) for i in range(4)]
    recorded = _talk("recorded", _thought(0), _thought(1), only_last=True)
    verbatim = _talk("verbatim", _thought(0), _emitted([50]), _emitted([50, 62]))
    rows: list[dict[str, Any] | bytes] = [*alike, recorded, verbatim, _talk("silent")]
    maker = RowMaker(dataclasses.replace(spec, turns=turns, max_tokens=1000))
    stats = [maker.make(_lines(rows), "a.jsonl", careful=careful).stats for careful in (False, True)]
    render = maker.fast.unfold.render
    assert isinstance(render, Skeletons) and render.num_filled == 2
    # Of the recorded row the last answer alone is the target's own, of the verbatim one those with ids.
    assert [(s.answers, s.answers_unsupervised) for s in stats] == [(4 * 3 + 1 + 2, unsupervised)] * 2
    assert stats[0] == stats[1]
