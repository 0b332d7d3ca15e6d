"""A run's plan says what it makes, and nothing of where and by whom; its card counts what was cut."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from draftmill.train.card import plan_of
from draftmill.train.data import open_input
from draftmill.train.run import run
from draftmill.train.samples import SampleSet
from sample_sets import open_samples, write_samples
from small_run import small_settings, write_small_run
from tiny import write_tiny_target

pytestmark = pytest.mark.torch

ELSEWHERE: dict[str, object] = {
    **{"placement": "split", "target_ranks": 2, "drafter_ranks": 3, "target_gpus": 2, "in_flight_bytes": 1},
    **{"rank_timeout_s": 5, "stall_timeout_s": 1, "store_patience_s": 1, "data_cache_bytes": 1, "max_poisoned": 0},
}


def test_a_run_may_go_on_wherever_it_is_placed_and_not_with_another_loss(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", num_layers=2, hidden_size=16)
    write_samples(tmp_path / "samples", [("a", [1, 2, 3], [True] * 3)], "hash")

    def plan_hash(**changed: object) -> str:
        settings = small_settings(tmp_path, tmp_path / "out", **changed)
        return plan_of(settings, open_input(settings), target).hash

    assert plan_hash(**ELSEWHERE) == plan_hash()
    assert plan_hash(lr=1e-4) != plan_hash() != plan_hash(kl_weight=1.0)


def test_samples_beyond_the_targets_window_are_cut_counted_and_told_once_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    config = write_small_run(tmp_path) / "target" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 40}))
    cuts = []
    for is_dry in (True, False):
        told = run(small_settings(tmp_path, tmp_path / "run", num_steps=3, dry_run=is_dry))
        cuts.append(told["inputs" if is_dry else "content"]["cut"])
        assert caplog.text.count("--max-tokens 100 lies above the target's window of 40 tokens") == len(cuts)
    samples = SampleSet(open_samples(tmp_path / "samples"))
    longer = sum(len(samples[i].input_ids) > 40 for i in range(samples.start_of(samples.parts.num_parts)))
    assert cuts == [longer, longer] and longer > 2
