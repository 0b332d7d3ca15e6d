"""Promises: an evaluation publishes measured prompts and a card, goes on where it was, and refuses what is not so."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from pydantic import ValidationError

from completion_sets import write_completions
from draftmill.chat.chat import open_chat
from draftmill.contracts.acceptance import summarize
from draftmill.contracts.cards import PLAN_FILE, Plan, canonical_json
from draftmill.contracts.errors import DataGateError, InputError, RecipeError
from draftmill.contracts.rows import Row
from draftmill.evaluate.run import run
from draftmill.extract.target import load_target
from draftmill.model.checkpoint import drafter_files, save_drafter
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.speculation.decode import Limits, decode_plainly
from draftmill.storage.checkpoints import put_checkpoint
from draftmill.storage.models import fingerprint
from draftmill.storage.sets import open_set
from draftmill.storage.store import open_store
from tiny import write_tiny_target
from tiny_drafter import overfit_drafter, random_drafter, tiny_shape

pytestmark = pytest.mark.torch

NEW_TOKENS = 9
FAMILIES = ("count", "list", "open")
NUM_ROWS = 9


class Line(NamedTuple):
    """A finished line up to evaluate: folders of target, run and completions, and the rows in them."""

    target: Path
    run: Path
    completions: Path
    rows: list[Row]


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> Line:
    return make_line(tmp_path_factory.mktemp("line"), "llama")


def make_line(folder: Path, family: Literal["llama", "qwen3_5"]) -> Line:
    target_folder = write_tiny_target(folder / "target", family=family)
    chat, target = open_chat(target_folder), load_target(target_folder)
    rows = []
    for index in range(NUM_ROWS):
        user = {"role": "user", "content": f"say {index}"}
        prompt = chat.encode(chat.render([user], add_generation_prompt=True))
        answer = decode_plainly(target, prompt, Limits(chat.stop_ids, NEW_TOKENS + 3, 2048)).token_ids
        said = {"role": "assistant", "content": "", "prompt_token_ids": prompt, "token_ids": list(answer)}
        family = FAMILIES[index % len(FAMILIES)]
        rows.append(Row(id=f"r{index}", family=family, messages=(user, said), sampling={"temperature": 0}))
    known = rows[0].messages[1]
    shape = tiny_shape(target)
    trained = overfit_drafter(target, shape, known["prompt_token_ids"], known["token_ids"], num_steps=8)
    stores = (open_store(str(folder / "run"), create=True),)
    put_checkpoint(stores, 0, "plan", drafter_files(random_drafter(shape)))
    put_checkpoint(stores, 8, "plan", drafter_files(trained))
    write_completions(folder / "completions", rows)
    return Line(target_folder, folder / "run", folder / "completions", rows)


def settings(line: Line, output: Path, **changes: Any) -> EvaluateSettings:
    values = {
        "checkpoint": str(line.run),
        "input": (str(line.completions),),
        "target": str(line.target),
        "output": (str(output),),
        "decode_prompts": 3,
        "decode_prompts_untrained": 2,
        "max_new_tokens": NEW_TOKENS,
        "reported_apart": ("open",),
    }
    return EvaluateSettings(**{**values, **changes})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(line, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluation")
    return folder, run(settings(line, folder))


def test_the_headline_is_the_walk_over_every_prompt_of_the_headline_families(finished):
    folder, card = finished
    content = card["content"]
    rows = [json.loads(ln) for part in content["parts"] for ln in (folder / part["file"]).read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == [f"r{index}" for index in range(NUM_ROWS)]
    headline = summarize([row["walked"] for row in rows if row["family"] != "open"], 4)
    assert (content["tau"], content["tau_micro"]) == (headline.tau, headline.tau_micro)
    assert (content["num_requests"], content["num_decoded"]) == (6, 3)
    assert set(content["families"]) == {"count", "list"}
    assert content["reported_apart"]["open"]["num_requests"] == 3
    assert content["step"] == 8
    decoded = [row for row in rows if "decoded" in row]
    assert [row["decoded"] for row in decoded] == [row["walked"] for row in decoded]
    assert all(sum(row["walked"]) == NEW_TOKENS - 1 for row in rows)
    assert {row["family"] for row in decoded} == {"count", "list"}


def test_the_untrained_drafter_is_measured_too(finished):
    content = finished[1]["content"]
    assert content["untrained"]["num_requests"] == 2
    assert 1.0 <= content["tau_untrained"] <= content["tau"]
    passes = sum(1 for _ in range(3)) + content["decoded"]["num_cycles"]
    assert content["tokens_per_target_pass"] == pytest.approx(3 * NEW_TOKENS / passes)


def test_every_figure_says_whether_it_was_walked_or_decoded_and_over_how_many_prompts(line, finished, capsys):
    folder, card = finished
    run(settings(line, folder))
    told = capsys.readouterr().err.splitlines()
    content, decoded = card["content"], card["content"]["decoded"]
    assert told[0].startswith(f"walked, the headline: tau {content['tau']:.3f}")
    assert told[0].endswith("block 4, along the answers to 6 prompts")
    assert told[1].startswith(f"decoded: tau {decoded['tau']:.3f}") and "over 3 of these prompts; lossless" in told[1]
    assert told[2].startswith("decoded, untrained: tau ") and told[2].endswith(" over 2 prompts")
    families = [ln for ln in told if ln.startswith("  walked, ")]
    assert len(families) == 3 and sum(ln.endswith(", 3 prompts") for ln in families) == 3


def test_times_are_told_apart_from_content(finished):
    card = finished[1]
    assert {"plain", "speculative", "walk", "speedup_wall", "speedup_cpu"} <= set(card["run"]["timings"])
    assert card["run"]["timings"]["plain"]["passes"] == 3 * NEW_TOKENS
    assert "wall" not in json.dumps(card["content"])


def test_an_interrupted_evaluation_ends_in_the_same_bytes(line, finished, tmp_path):
    folder, card = finished
    whole = files_of(folder)
    for name, data in whole.items():
        if name != "card.json" and "decoded-00001" not in name and name != "walked-00000.json":
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
    kept = (tmp_path / "decoded-00000.jsonl").stat().st_mtime_ns
    again = run(settings(line, tmp_path))
    assert again["content_hash"] == card["content_hash"]
    assert (tmp_path / "decoded-00000.jsonl").stat().st_mtime_ns == kept
    parts = {name: data for name, data in files_of(tmp_path).items() if "timings" not in name and name != "card.json"}
    assert parts == {name: data for name, data in whole.items() if "timings" not in name and name != "card.json"}


def test_a_finished_evaluation_is_shown_again_and_writes_nothing(line, finished):
    folder, card = finished
    before = files_of(folder)
    assert run(settings(line, folder)) == card
    assert files_of(folder) == before


def test_two_outputs_one_on_an_object_store_hold_the_same(line, tmp_path, s3_url, monkeypatch):
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    here = settings(line, tmp_path / "here", decode_prompts=1)
    card = run(here.model_copy(update={"output": (*here.output, s3_url)}))
    there = open_set(s3_url, "evaluate")
    assert there.card.content_hash == card["content_hash"]
    for file in there.inputs:
        assert there.local(file).read_bytes() == (tmp_path / "here" / file.key).read_bytes()
    assert run(here.model_copy(update={"output": (s3_url,)}))["content_hash"] == card["content_hash"]


def test_a_dry_run_tells_what_is_left_and_writes_nothing(line, finished, tmp_path):
    told = run(settings(line, tmp_path / "none", dry_run=True))
    assert told["left"] == ["decoded-00000", "decoded-00001", "walked-00000"]
    assert not (tmp_path / "none").exists() and not told["done"]
    told = run(settings(line, finished[0], dry_run=True))
    assert (told["left"], told["done"]) == ([], True)
    with pytest.raises(RecipeError, match="max_new_tokens was"):
        run(settings(line, finished[0], max_new_tokens=NEW_TOKENS + 1, dry_run=True))


def test_answers_that_are_not_the_targets_own_are_refused(line, tmp_path):
    rows = []
    for row in line.rows:
        said = {**row.messages[1], "token_ids": [9, *row.messages[1]["token_ids"]]}
        rows.append(Row(id=row.id, family=row.family, messages=(row.messages[0], said), sampling=row.sampling))
    write_completions(tmp_path / "foreign", rows)
    with pytest.raises(DataGateError, match="plain answer and the set's answer") as refused:
        run(settings(line, tmp_path / "out", input=(str(tmp_path / "foreign"),)))
    assert refused.value.exit_code == 3
    assert not (tmp_path / "out" / "card.json").exists()


def test_sampled_answers_are_refused(line, tmp_path):
    row = line.rows[0]
    write_completions(tmp_path / "warm", [Row(id="w", messages=row.messages, sampling={"temperature": 0.7})])
    with pytest.raises(InputError, match="temperature"):
        run(settings(line, tmp_path / "out", input=(str(tmp_path / "warm"),)))


def test_a_promised_acceptance_length_that_is_missed_is_refused(line, finished, tmp_path):
    folder, card = finished
    with pytest.raises(DataGateError, match="--min-tau"):
        run(settings(line, folder, min_tau=4.0))
    assert run(settings(line, folder, min_tau=card["content"]["tau"])) == card
    with pytest.raises(DataGateError, match="--min-tau"):
        run(settings(line, tmp_path, min_tau=4.0))
    assert not (tmp_path / "card.json").exists()


def test_rows_without_token_ids_are_left_out_and_told(line, tmp_path):
    bare = Row(id="bare", messages=(line.rows[0].messages[0], {"role": "assistant", "content": "x"}))
    write_completions(tmp_path / "mixed", [bare, *line.rows[:2]])
    card = run(settings(line, tmp_path / "out", input=(str(tmp_path / "mixed"),), decode_prompts=1))
    assert [drop["id"] for drop in card["content"]["left_out"]] == ["bare"]
    assert card["content"]["num_requests"] == 2


def test_prompts_alone_are_decoded_with_an_exported_drafter(line, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"say {i}"}) + "\n" for i in range(4)))
    save_drafter(tmp_path / "drafter", random_drafter(tiny_shape(load_target(line.target))))
    checkpoint = str(tmp_path / "drafter")
    card = run(settings(line, tmp_path / "out", input=(str(prompts),), checkpoint=checkpoint, decode_prompts=2))
    content = card["content"]
    assert (content["num_requests"], content["num_decoded"], content["tau_untrained"]) == (2, 2, None)
    assert len(content["left_out"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_told(line, tmp_path):
    with pytest.raises(RecipeError, match="--device cuda: torch finds no CUDA device"):
        run(settings(line, tmp_path, device="cuda"))
    with pytest.raises(RecipeError, match=r"--target-gpus 2: torch finds no CUDA device here .*--target-gpus 1 to"):
        run(settings(line, tmp_path, target_gpus=2))
    with pytest.raises(ValidationError, match="--target-gpus 2 counts CUDA devices, and --device cpu uses none"):
        settings(line, tmp_path, target_gpus=2, device="cpu")


def test_a_hybrid_target_is_evaluated_as_any_other(tmp_path):
    content = run(settings(make_line(tmp_path, "qwen3_5"), tmp_path / "out"))["content"]
    assert (content["num_requests"], content["num_decoded"], content["lossless"]) == (6, 3, True)
    assert 1.0 <= content["tau_untrained"] < content["tau"] < 4.0


def test_in_bfloat16_larger_ties_are_excused_and_told(line, finished, tmp_path):
    content = run(settings(line, tmp_path, compute_dtype="bfloat16"))["content"]
    assert content["recipe"]["compute_dtype"] == "bfloat16"
    assert all(tie["gap"] <= 0.5 for tie in content["ties"])
    assert content["tau"] == pytest.approx(finished[1]["content"]["tau"], rel=0.3)
    with pytest.raises(RecipeError, match="compute_dtype"):
        run(settings(line, finished[0], compute_dtype="bfloat16"))


@pytest.mark.parametrize("named", ["", "checkpoints/step-00000008", "checkpoints/step-00000008/"])
def test_a_drafter_of_another_target_is_refused_by_the_plan_of_its_run(line, tmp_path, named):
    def trained_for(target: str) -> None:
        plan = Plan(room="train", recipe={"target": target}, inputs=(), parts=())
        store = open_store(str(tmp_path / "run"), create=True)
        store.put(PLAN_FILE, canonical_json(plan))
        put_checkpoint((store,), 8, plan.hash, files)

    files = drafter_files(random_drafter(tiny_shape(load_target(line.target))))
    asked = settings(line, tmp_path / "out", checkpoint=f"{tmp_path}/run/{named}", dry_run=True)
    trained_for("f00d" * 16)
    with pytest.raises(InputError, match=rf"run/{named} was trained for another target .*f00d.*{line.target} "):
        run(asked)
    trained_for(fingerprint(line.target))
    assert run(asked)["left"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"}),
        ("generation_config.json", {"eos_token_id": [65, 66]}),
    ],
)
def test_another_template_or_other_stop_tokens_are_another_evaluation(line, finished, tmp_path, file, change):
    target = shutil.copytree(line.target, tmp_path / "target")
    (target / file).write_text(json.dumps({**json.loads((target / file).read_text()), **change}))
    assert fingerprint(target) == fingerprint(line.target)
    with pytest.raises(RecipeError, match=r"template_hash|stop_ids"):
        run(settings(line, finished[0], target=str(target)))
