"""Promises: the estimate of a Qwen3.6-27B drafter gives the published figures; sizes of dense models are exact."""

import json

import pytest

from draftmill.contracts.cards import PartRecord, Plan, PlannedPart, make_card
from draftmill.contracts.errors import InputError
from draftmill.estimate.cost import Workload, cost
from draftmill.estimate.drafter import DrafterSize
from draftmill.estimate.run import run
from draftmill.estimate.table import readable
from draftmill.estimate.target import target_size
from draftmill.settings.estimate import EstimateSettings
from draftmill.storage.sets import open_set_writer

QWEN3_6_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
}
DRAFTER = DrafterSize(
    hidden_size=5120,
    num_layers=5,
    num_taps=5,
    block_size=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=17408,
)
TAPS = (1, 16, 31, 46, 61)
# dflash.md rounds to two or three digits and takes the attention's share more coarsely.
ROUNDED = 0.03


def figures(num_anchors: int) -> dict:
    work = Workload(num_tokens=902_087 * 2068, mean_length=2068, num_epochs=1, num_anchors=num_anchors, max_tokens=2068)
    return cost(target_size(QWEN3_6_27B), DRAFTER, TAPS, work, achieved_tflops=1.0)


def test_parameters_and_tensors_of_the_27b_drafter_are_exact():
    assert (DRAFTER.num_parameters, DRAFTER.num_tensors) == (1_730_213_120, 58)


def test_bytes_of_the_27b_drafter_are_the_published_ones():
    got = figures(512)
    assert got["feature_bytes"] == 51_200
    assert got["features_on_disk_bytes"] == pytest.approx(95e12, rel=0.01)
    assert got["embedding_and_head_bytes"] == pytest.approx(5.1e9, rel=0.01)
    assert got["drafter_state_bytes"] == pytest.approx([28e9, 31e9], rel=0.02)


def test_operations_of_the_27b_target_and_drafter_are_the_published_ones():
    got = figures(512)
    assert got["target_gflop"] == pytest.approx(52.0, rel=ROUNDED)
    assert got["target_gflop_to_last_tap"] == pytest.approx(47.9, rel=ROUNDED)
    assert got["drafter_gflop_per_context_token"] == pytest.approx(0.84, rel=0.01)
    assert got["drafter_gflop_per_slot"] == pytest.approx(15.0, rel=ROUNDED)
    assert got["notes"], "a hybrid's figures are approximate and say so"


@pytest.mark.parametrize(("num_anchors", "ratio"), [(512, 1.26), (256, 0.64), (128, 0.33)])
def test_the_drafter_costs_the_published_share_of_the_target(num_anchors, ratio):
    assert figures(num_anchors)["drafter_to_target_ratio"] == pytest.approx(ratio, rel=0.05)


def test_a_sample_has_no_more_anchors_than_tokens():
    short = Workload(num_tokens=100, mean_length=10, num_epochs=1, num_anchors=512, max_tokens=16)
    assert short.slots_per_token(8) == 8


def test_hours_follow_from_operations_and_rate():
    got = figures(128)
    flop = 1e9 * (
        got["target_gflop_to_last_tap"]
        + got["drafter_gflop_per_context_token"]
        + got["slots_per_token"] * got["drafter_gflop_per_slot"]
    )
    assert got["hours_per_epoch"] * 3600 * 1e12 == pytest.approx(flop * 902_087 * 2068)


@pytest.mark.torch
@pytest.mark.parametrize("tie", [True, False])
def test_weights_of_a_dense_target_are_those_torch_counts(tie):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, tie_word_embeddings=tie,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = target_size(config.to_dict())
    matrices = sum(p.numel() for name, p in model.model.layers.named_parameters() if "norm" not in name)
    assert sum(layer.weights for layer in size.layers) == matrices
    assert size.forward_flop(context=0) == 2 * (matrices + model.lm_head.weight.numel())
    assert size.borrowed_bytes == 2 * sum(
        p.numel() for name, p in model.named_parameters() if "embed" in name or "lm_head" in name
    )


def target_folder(tmp_path, config):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_command_takes_the_amount_of_text_from_a_card(tmp_path):
    plan = Plan(room="tokenize", recipe={}, inputs=(), parts=(PlannedPart(name="part-00000", inputs=()),))
    writer = open_set_writer([str(tmp_path / "samples")], plan)
    record = PartRecord(
        name="part-00000", file="part-00000.arrow", rows_in=4, rows=4, tokens=400, bytes=1, sha256="", plan=plan.hash
    )
    writer.finish(make_card("tokenize", plan, (record,), {"samples": 5}, {}))
    folder = target_folder(tmp_path, {"text_config": QWEN3_6_27B})
    got = run(EstimateSettings(target=folder, input=str(tmp_path / "samples")))
    assert (got["num_tokens"], got["mean_length"]) == (400, 80)


def test_a_folder_without_config_and_a_config_without_a_key_are_named(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        run(EstimateSettings(target=str(tmp_path)))
    with pytest.raises(InputError, match="num_attention_heads"):
        run(EstimateSettings(target=target_folder(tmp_path, {"hidden_size": 8})))


@pytest.mark.parametrize(
    ("hours", "says"),
    [
        (0.5, "time              0.5 h an epoch at 1 tokens/s, 1.0 h in all"),
        (0.05, "time              3 min 00 s an epoch at 1 tokens/s, 0.1 h in all"),
        (0.005, "time              18 s an epoch at 1 tokens/s, 36 s in all"),
        (1e-6, "time              less than 1 s an epoch at 1 tokens/s, less than 1 s in all"),
    ],
)
def test_times_of_small_jobs_are_told_in_minutes_and_seconds(hours, says):
    told = readable({**figures(128), "tokens_per_s": 1.0, "hours_per_epoch": hours, "hours": 2 * hours}, 7.5)
    assert says in told.splitlines()
    assert "7.5 TFLOP/s" in told and "--achieved-tflops" in told


def test_sizes_are_told_in_the_unit_that_suits_them():
    large, small = readable(figures(128), 1.0), readable({**figures(128), "features_on_disk_bytes": 2_500_000}, 1.0)
    assert "51.2 kB a token, 95.5 TB if they were stored" in large
    assert "27.7 GB to 31.1 GB, and 5.09 GB of frozen embedding and head" in large
    assert "2.5 MB if they were stored" in small
    assert "0.04 kB if they were stored" in readable({**figures(128), "features_on_disk_bytes": 40}, 1.0)
