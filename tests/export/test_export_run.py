"""Promises: the exported folder holds every trained tensor bit for bit and nothing else, and engines read it right."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.contracts.cards import Plan, canonical_json
from draftmill.contracts.errors import InputError, RecipeError, StorageError
from draftmill.export.engines import READERS, as_trained, check_config, serving_commands
from draftmill.export.layout import check_layout, manifest
from draftmill.export.run import run
from draftmill.extract.target import load_target
from draftmill.model.checkpoint import drafter_files, load_drafter
from draftmill.model.drafter import Drafter
from draftmill.settings.export import ExportSettings
from draftmill.storage.checkpoints import put_checkpoint
from draftmill.storage.origin import TrainedFor, trained_for
from draftmill.storage.store import open_store
from tiny import write_tiny_target
from tiny_drafter import random_drafter, tiny_shape

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Drafter:
    target = load_target(write_tiny_target(tmp_path_factory.mktemp("target")))
    return random_drafter(tiny_shape(target, block_size=5, window=6))


@pytest.fixture(scope="module")
def checkpoint(drafter, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    store = open_store(folder)
    put_checkpoint((store,), 0, "plan", drafter_files(random_drafter(drafter.shape, seed=1)))
    put_checkpoint((store,), 7, "plan", drafter_files(drafter) | {"optimizer.safetensors": b"moments"})
    return folder


def export(checkpoint: str, output: Path, **changes: Any) -> dict[str, Any]:
    return run(ExportSettings(**{"checkpoint": checkpoint, "output": str(output), "dtype": "float32", **changes}))


def test_every_trained_tensor_is_there_bit_for_bit_and_no_other(drafter, checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == dict(drafter.named_parameters()).keys()
    assert len(tensors) == 11 * 2 + 3
    assert all(torch.equal(tensors[name], weight) for name, weight in drafter.named_parameters())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "draftmill.json",
    }


def test_bfloat16_is_the_rounded_weights_and_loads_again(drafter, checkpoint, tmp_path):
    card = export(checkpoint, tmp_path / "out", dtype="bfloat16")
    again = load_drafter(tmp_path / "out")
    assert all(torch.equal(w, drafter.state_dict()[name].bfloat16()) for name, w in again.state_dict().items())
    assert (card["content"]["step"], card["content"]["block_size"]) == (7, 5)
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_a_finished_export_is_shown_again_and_left_alone(checkpoint, tmp_path):
    card = export(checkpoint, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert export(checkpoint, tmp_path / "out") == card
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_another_export_into_the_same_folder_is_refused_with_the_cure(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    with pytest.raises(RecipeError, match=r"dtype differ.*name another --output"):
        export(checkpoint, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(RecipeError, match="source differ"):
        export(f"{checkpoint}/checkpoints/step-00000000", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(RecipeError, match="no export of draftmill"):
        export(checkpoint, tmp_path / "mine")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"room":"export","content":{},"content_hash":"","run":{}}', b"\xff"])
def test_a_damaged_card_of_an_export_is_told(checkpoint, tmp_path, data):
    export(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "draftmill.json").write_bytes(data)
    with pytest.raises(StorageError, match=r"draftmill\.json was cut or changed .*run again"):
        export(checkpoint, tmp_path / "out")


def test_an_object_store_is_no_place_that_engines_load_from(checkpoint):
    with pytest.raises(RecipeError, match="local folder"):
        run(ExportSettings(checkpoint=checkpoint, output="s3://bucket/export"))


def test_an_export_that_was_changed_is_noticed(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(StorageError, match=r"config\.json is missing or was changed"):
        export(checkpoint, tmp_path / "out")


def test_what_a_killed_export_left_goes_and_what_another_is_making_stays(checkpoint, tmp_path):
    left, others = (tmp_path / f"out.tmp-{platform.node()}-{pid}" for pid in (1 << 23, os.getppid()))
    for draft in (left, others):
        draft.mkdir()
        (draft / "model.safetensors").write_bytes(b"cut")
    export(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", others.name]


def test_a_dry_run_writes_nothing(checkpoint, tmp_path):
    told = export(checkpoint, tmp_path / "out", dry_run=True)
    assert (told["left"], told["done"]) == ([str(tmp_path / "out")], False)
    assert not any(tmp_path.iterdir())
    export(checkpoint, tmp_path / "out")
    told = export(checkpoint, tmp_path / "out", dry_run=True)
    assert (told["left"], told["done"]) == ([], True)
    with pytest.raises(RecipeError, match="dtype differ"):
        export(checkpoint, tmp_path / "out", dtype="bfloat16", dry_run=True)


def test_every_engine_reads_what_was_trained(drafter, checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert {name: read(config) for name, read in READERS.items()} == dict.fromkeys(READERS, as_trained(drafter.shape))


@pytest.mark.parametrize(
    ("place", "key"),
    [("dflash_config", "target_layer_ids"), ("dflash_config", "mask_token_id"), ("", "block_size"), ("", "rope_theta"),
     ("rope_parameters", "rope_theta"), ("", "model_type"), ("", "head_dim"), ("", "dflash_config")],
)  # fmt: skip
def test_a_config_without_a_key_that_an_engine_needs_is_refused(drafter, place, key):
    config = drafter.shape.to_config()
    del (config[place] if place else config)[key]
    with pytest.raises(InputError, match=key):
        check_config(config, drafter.shape)


def test_a_config_that_an_engine_would_misread_is_refused(drafter):
    config = drafter.shape.to_config()
    config["dflash_config"]["target_layer_ids"] = [2, 4]
    with pytest.raises(InputError, match="would read"):
        check_config(config, drafter.shape)
    with pytest.raises(InputError, match="known anchor"):
        check_config({**drafter.shape.to_config(), "sample_from_anchor": True}, drafter.shape)


def test_the_manifest_is_the_networks_own_parameters(drafter):
    assert manifest(drafter.shape) == {name: tuple(w.shape) for name, w in drafter.named_parameters()}


PLAN = Plan(room="train", recipe={"target": "f00d" * 16}, inputs=(), parts=())


def run_for(folder: Path, drafter: Drafter, target: str | None) -> str:
    """A run with one checkpoint; its recipe names the target, or is gone."""
    store = open_store(str(folder), create=True)
    store.put("plan.json", canonical_json(PLAN))
    if target is not None:
        store.put("recipe.json", canonical_json({"target": target, "lr": 1}))
    put_checkpoint((store,), 7, PLAN.hash, drafter_files(drafter))
    return str(folder)


@pytest.mark.parametrize(
    ("target", "served", "said"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "It was trained for `Qwen/Qwen3-8B` "),
        ("../my models/a b", "'../my models/a b'", "It was trained for `../my models/a b` "),
        ("package:llm-x", "TARGET", "It was trained for `package:llm-x` "),
        (None, "TARGET", "It was trained for a target whose name was not recorded "),
    ],
)
@pytest.mark.parametrize("named", ["", "/checkpoints/step-00000007/"])
def test_an_export_names_the_target_of_its_run_and_is_exported_on_with_it(
    drafter, tmp_path, target, served, said, named
):
    card = export(run_for(tmp_path / "run", drafter, target) + named, tmp_path / "out")
    for folder in ("out", "again"):
        assert card["content"]["step"] == 7
        assert card["content"]["target"] == {"name": target, "fingerprint": "f00d" * 16}
        assert card["content"]["serving"]["vLLM"].startswith(f"vllm serve {served} --spec")
        text = (tmp_path / folder / "README.md").read_text()
        assert said in text and "f00d" * 16 in text and f"--model-path {served} " in text
        assert ("TARGET that model" in text) == (served == "TARGET")
        card = export(str(tmp_path / "out"), tmp_path / "again")


def test_a_checkpoint_that_is_named_by_a_link_has_its_runs_target(drafter, tmp_path):
    (tmp_path / "link").symlink_to(run_for(tmp_path / "run", drafter, "T") + "/checkpoints/step-00000007")
    assert trained_for(str(tmp_path / "link")) == TrainedFor(name="T", fingerprint="f00d" * 16)


def test_an_export_of_a_checkpoint_without_a_run_says_that_its_target_is_not_known(checkpoint, tmp_path):
    assert export(checkpoint, tmp_path / "out")["content"]["target"] is None
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Which target it was trained for was not recorded" in text and "vllm serve TARGET " in text


def test_what_is_damaged_names_no_target_and_stops_no_export(drafter, tmp_path):
    url = run_for(tmp_path / "run", drafter, "T")
    for data in (b"{", b"[]", b"\xff"):
        (tmp_path / "run" / "recipe.json").write_bytes(data)
        assert trained_for(url) == TrainedFor(name=None, fingerprint="f00d" * 16)
    export(url, tmp_path / "out")
    for data in (b"{", b'{"content": {"target": 3}}', b'{"content": {}}'):
        (tmp_path / "out" / "draftmill.json").write_bytes(data)
        assert trained_for(str(tmp_path / "out")) is None


def test_a_missing_foreign_or_altered_tensor_is_named(drafter, checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    missing = {name: weight for name, weight in tensors.items() if name != "fc.weight"}
    altered = {**tensors, "norm.weight": tensors["norm.weight"].nextafter(torch.tensor(9.0))}
    broken = {**tensors, "norm.weight": tensors["norm.weight"] * float("nan")}
    foreign = {**tensors, "embed_tokens.weight": torch.zeros(2, 2)}
    for changed, name in ((missing, "fc"), (altered, "norm"), (broken, "norm"), (foreign, "embed_tokens")):
        save_file(changed, file)
        with pytest.raises(InputError, match=f"{name}.weight"):
            check_layout(tmp_path / "out", drafter, torch.float32)


def test_both_engines_are_told_the_same_block():
    commands = serving_commands("T", "/d", 16)
    assert commands["vLLM"].startswith("vllm serve T --speculative-config '{") and '"model": "/d"' in commands["vLLM"]
    assert '"num_speculative_tokens": 15' in commands["vLLM"]
    assert "--speculative-num-draft-tokens 16" in commands["SGLang"]
