"""inspect looks at any tokenized set, ours or a stranger's, and puts the gate's question to it."""

from pathlib import Path
from typing import Any

import pytest

import completions
from completions import row, write_rows
from draftmill.cli import main
from draftmill.contracts.errors import DataGateError, InputError, RecipeError, StorageError
from draftmill.settings.inspect import InspectSettings
from draftmill.tokenize.inspect import run
from draftmill.tokenize.run import run as tokenize
from tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer and the samples of nine rows."""
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    write_tiny_tokenizer(tmp_path / "tokenizer")
    source = write_rows(tmp_path / "a.jsonl", [*(row(i) for i in range(9)), b"{", row(0)])
    tokenize(completions.settings(tmp_path, source, tmp_path / "tokenizer", part_bytes=400))
    return tmp_path


def test_the_figures_are_those_of_the_card(place: Path, capsys: pytest.CaptureFixture[str]):
    card = tokenize(completions.settings(place, place / "a.jsonl", place / "tokenizer", part_bytes=400))
    seen = run(InspectSettings(input=str(place / "samples")))
    shared = seen.keys() & card["content"].keys()
    assert {"samples", "tokens", "supervised_tokens", "supervised_histogram", "length_per_sample"} <= shared
    assert {k: seen[k] for k in shared} == {k: card["content"][k] for k in shared}
    assert "9 samples" in capsys.readouterr().err


def test_a_sample_is_shown_with_what_is_supervised_in_brackets(place: Path, capsys: pytest.CaptureFixture[str]):
    chosen = InspectSettings(input=str(place / "samples"), row=1, tokenizer=str(place / "tokenizer"))
    assert run(chosen)["id"] == "row-1"
    shown = capsys.readouterr().err
    assert shown.endswith("<|im_start|>assistant\n⟦green blue yellow apple ten red<|im_end|>⟧\n\n")
    for number in (9, -1):
        with pytest.raises(InputError, match=f"{place}/samples has no sample {number}: it has 9, numbered from 0"):
            run(chosen.model_copy(update={"row": number}))
    with pytest.raises(RecipeError, match="--tokenizer"):
        run(InspectSettings(input=str(place / "samples"), row=1))


def _save(folder: Path, **columns: list[Any]) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return str(folder)


def test_the_gate_refuses_a_stranger_s_spike_by_mask_and_by_labels(tmp_path: Path):
    ids = [[number, *range(40)] for number in range(100)]
    supervised = [6 if number < 87 else 20 + number % 13 for number in range(100)]
    masks = [[0] * (41 - n) + [1] * n for n in supervised]
    labels = [[-100] * (41 - n) + list(range(n)) for n in supervised]
    for name, column in (("loss_mask", masks), ("labels", labels)):
        url = _save(tmp_path / name, input_ids=ids, **{name: column})
        assert run(InspectSettings(input=url))["samples"] == 100, "without --gate it is only shown"
        with pytest.raises(DataGateError, match=r"87\.0% of 100 samples have exactly 6"):
            run(InspectSettings(input=url, gate=True))
        assert run(InspectSettings(input=url, gate=True, max_spike_frac=0.9))["supervised_tokens"] == sum(supervised)


def test_a_stranger_s_large_lists_and_several_batches_are_read(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "input_ids": datasets.LargeList(datasets.Value("int64")),
            "labels": datasets.LargeList(datasets.Value("int64")),
        }
    )
    rows = {"input_ids": [[i, 2, 3] for i in range(2500)], "labels": [[-100, 2, 3]] * 2500}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "large"), num_shards=3)
    seen = run(InspectSettings(input=str(tmp_path / "large")))
    assert (seen["samples"], seen["tokens"], seen["supervised_tokens"]) == (2500, 7500, 5000)


def test_what_is_no_tokenized_set_says_what_is_wanted(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(InputError, match="name a tokenized set"):
        run(InspectSettings(input=str(tmp_path)))
    with pytest.raises(InputError, match="columns text; wanted are input_ids and one of loss_mask"):
        run(InspectSettings(input=_save(tmp_path / "text", text=["a"])))
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]})})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match="DatasetDict: name one of its folders, train"):
        run(InspectSettings(input=str(tmp_path / "splits")))


def test_a_cut_shard_is_named(place: Path, tmp_path: Path):
    shard = place / "samples" / "part-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(StorageError, match=r"part-00001\.arrow is not what its card says"):
        run(InspectSettings(input=str(place / "samples")))
    url = _save(tmp_path / "theirs", input_ids=[[1, 2]], labels=[[1, 2]])
    (data,) = Path(url).glob("*.arrow")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(StorageError, match="cut, or still being written"):
        run(InspectSettings(input=url))


def test_the_command_takes_the_set_as_its_argument(place: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(place / "samples"), "--gate"]) == 0
    assert '"samples":9' in capsys.readouterr().out.splitlines()[-1]
    assert main(["inspect", str(place / "samples"), "--gate", "--min-judged", "5", "--max-spike-frac", "0.01"]) == 3
    assert '"exit_code":3' in capsys.readouterr().out.splitlines()[-1]
    assert main(["inspect", str(place / "samples"), "--row", "-1", "--tokenizer", str(place / "tokenizer")]) == 1
    assert "has no sample -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [[1, 2]], "loss_mask": [[None, 1]]}, "values of the column loss_mask are null"),
        ({"input_ids": [[1, 1 << 40]], "loss_mask": [[1, 1]]}, "token ids from 1 to 1099511627776"),
        ({"input_ids": [[-1, 2]], "loss_mask": [[1, 1]]}, "token ids from -1 to 2"),
        ({"input_ids": [1, 2], "loss_mask": [[1], [1]]}, "the column input_ids is of int32"),
        ({"input_ids": [["a"]], "loss_mask": [[1]]}, "the column input_ids is of list<"),
    ],
)
def test_columns_that_are_no_ids_or_masks_are_named(tmp_path: Path, columns: dict[str, list[Any]], words: str):
    with pytest.raises(InputError, match=words):
        run(InspectSettings(input=_save(tmp_path / "set", **columns)))


def test_the_gate_refuses_a_set_without_samples(tmp_path: Path):
    url = _save(tmp_path / "set", input_ids=[[1]], loss_mask=[[1]])
    state = Path(url) / "state.json"
    state.write_text('{"_data_files": []}')
    with pytest.raises(DataGateError, match="holds no sample"):
        run(InspectSettings(input=url, gate=True))
    state.write_text("[]")
    with pytest.raises(StorageError, match="is not what datasets writes"):
        run(InspectSettings(input=url))
