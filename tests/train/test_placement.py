"""Wherever target and drafter lie, and on how many ranks, a run ends in the same weights and has the same losses."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from completion_sets import write_completions  # noqa: E402
from draftmill.contracts.rows import Row  # noqa: E402
from draftmill.extract.target import load_target  # noqa: E402
from draftmill.speculation.decode import Limits, decode_plainly  # noqa: E402
from draftmill.storage.checkpoints import step_folder  # noqa: E402
from draftmill.train.run import run  # noqa: E402
from small_run import (  # noqa: E402
    NUM_STEPS,
    PLACEMENTS,
    SAVE_EVERY,
    run_in_turn,
    small_settings,
    stop_at,
    write_small_run,
)

pytestmark = pytest.mark.torch

# What the target says is learnt from too, noise is added, two steps share a pass of the target, and the weights are
# measured between the two: all that travels.
DRAWS = 2
HARD: dict[str, object] = {"kl_weight": 0.5, "feature_noise": 0.02, "draws_per_pass": DRAWS, "eval_every": SAVE_EVERY}
NEW_TOKENS = 9
HARD |= {"eval_max_new_tokens": NEW_TOKENS, "eval_decode_prompts": 2}
PROMPTS = ((7, 8, 9), (20, 30, 40, 50), (100, 101))
TAUS = ("tau", "tau_micro", "tau_walked", "tau_walked_micro")
BIT_EQUAL = {"split 1+1": "alone", "split 2+1": "alone", "split 1+2": "shared 2", "split 2+2": "shared 2"}


def write_answers(target: Path, output: Path) -> None:
    """Held-out prompts with the target's own answers."""
    loaded, limits = load_target(target), Limits(frozenset(), NEW_TOKENS, 2048)
    rows = []
    for i, prompt in enumerate(PROMPTS):
        answer = decode_plainly(loaded, prompt, limits).token_ids
        turn = {"role": "assistant", "content": "", "prompt_token_ids": list(prompt), "token_ids": list(answer)}
        rows.append(Row(id=f"h{i}", messages=({"role": "user", "content": "say"}, turn)))
    write_completions(output, rows)


def forget_figures(metrics: Path, step: int) -> None:
    """Leaves the line of a step as it stands where its measurement was cut off."""
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    for key in [key for key in found[step - 1] if key.startswith("tau") or key == "eval_s"]:
        del found[step - 1][key]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run alone and in every placement; its folders by name."""
    folder = write_small_run(tmp_path_factory.mktemp("placement"))
    write_answers(folder / "target", folder / "held-out")
    chosen = {**HARD, "eval_input": (str(folder / "held-out"),)}
    run(small_settings(folder, folder / "alone", **chosen))
    stop_at(folder / "alone", folder / "gone on by 2+2", SAVE_EVERY)
    forget_figures(folder / "gone on by 2+2" / "metrics.jsonl", SAVE_EVERY)
    turns = [{**changed, "output": (str(folder / name),)} for name, changed in PLACEMENTS.items()]
    run_in_turn(small_settings(folder, folder, **chosen), 4, turns)
    return folder


def weights(runs: Path, name: str, step: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    return load_file(runs / name / step_folder(step) / "model.safetensors")


def lines(runs: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_run_ends_in_the_same_weights_wherever_it_is_placed(runs: Path, name: str) -> None:
    alone, found, start = weights(runs, "alone"), weights(runs, name), weights(runs, "alone", 0)
    for key, weight in alone.items():
        moved = (weight - start[key]).abs().max()
        torch.testing.assert_close(found[key], weight, rtol=0, atol=2e-3 * float(moved))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_losses_and_counts_are_those_of_one_process(runs: Path, name: str) -> None:
    for mine, theirs in zip(lines(runs, name), lines(runs, "alone"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        keys = ("step", "epoch", "lr", "tokens", "slots", "acceptance", "slot_accuracy")
        assert {key: mine[key] for key in keys} == {key: theirs[key] for key in keys}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_held_out_prompts_say_the_same_wherever_they_are_decoded(runs: Path, name: str) -> None:
    mine, theirs = ([{key: line.get(key) for key in TAUS} for line in lines(runs, n)] for n in (name, "alone"))
    for key in ("tau", "tau_walked"):
        assert [line[key] is not None for line in theirs] == [step in (3, 6) for step in range(1, NUM_STEPS + 1)]
    assert mine == theirs  # also of the step at which the one that goes on stood, and had none


@pytest.mark.parametrize(("name", "twin"), BIT_EQUAL.items())
def test_what_is_added_up_in_the_same_order_is_equal_bit_for_bit(runs: Path, name: str, twin: str) -> None:
    twins = weights(runs, twin)
    assert all(torch.equal(weight, twins[key]) for key, weight in weights(runs, name).items())


def test_a_run_goes_on_elsewhere_from_where_it_stood(runs: Path) -> None:
    begun, name = lines(runs, "alone")[:SAVE_EVERY], "gone on by 2+2"
    kept = [{key: line[key] for key in line if key != "eval_s"} for line in lines(runs, name)[:SAVE_EVERY]]
    assert kept == [{key: line[key] for key in line if key != "eval_s"} for line in begun]  # not made again
    assert all("grow" in line for line in lines(runs, name)[SAVE_EVERY:])


def test_placement_split_says_who_waits_for_whom(runs: Path) -> None:
    for line in lines(runs, "split 2+1"):
        is_reading = line["step"] % DRAWS == 1  # the other step's states are there already
        assert 0 <= line["waiting_frac"] <= 1 and (line["in_flight_bytes"] > 0) == is_reading
        assert line["grow"] in ("target", "drafter", None)
        assert 0 <= line["held_frac"] <= 1 and (0 < line["target_frac"] <= 1) == is_reading
        assert 0 < line["drafter_frac"] + line["optimizer_frac"] + line["waiting_frac"] < 1.01
    assert "grow" not in lines(runs, "shared 2")[0]
