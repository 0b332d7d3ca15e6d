"""Promises: the page tells what every room left, says what is missing, loads nothing from elsewhere, escapes text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftmill.contracts.cards import Card, canonical_json
from draftmill.contracts.errors import InputError
from draftmill.report.curves import MAX_POINTS, curve
from draftmill.report.run import run
from draftmill.settings.report import ReportSettings

ACCEPTANCE = {"tau": 2.5, "tau_micro": 2.25, "num_requests": 7, "num_cycles": 90, "num_tokens": 200}
EVALUATION = {
    **ACCEPTANCE,
    "accepted_frac": [0.75, 0.5, 0.25],
    "block_size": 4,
    "lossless": True,
    "ties": [{"id": "tied-1", "position": 3, "between": "a and b", "gap": 0.0005}],
    "tau_untrained": 1.01,
    "untrained": {**ACCEPTANCE, "tau": 1.01},
    "decoded": {**ACCEPTANCE, "tau": 2.44},
    "families": {"<script>alert(1)</script>": ACCEPTANCE},
    "reported_apart": {"open": None},
    "definition": "tau is …",
}
TOTALS = {"rows_in": 1234, "rows": 1200, "tokens": 98765, "dropped": {"no answer": 34}}
HISTOGRAM = [{"from": 4, "to": 7, "samples": 10}, {"from": 8, "to": 15, "samples": 1190}]


def put(folder: Path, room: str, content: dict[str, Any], name: str = "card.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    card = Card(room=room, content=content, content_hash="", run={"seconds": 12.5, "cpu_seconds": 9.0, "commit": "abc"})
    (folder / name).write_bytes(canonical_json(card))


@pytest.fixture
def line(tmp_path: Path) -> Path:
    put(tmp_path / "run/completions/train", "generate", TOTALS)
    put(tmp_path / "run/samples", "tokenize", {**TOTALS, "supervised_histogram": HISTOGRAM})
    put(tmp_path / "run/evaluation", "evaluate", EVALUATION)
    put(tmp_path / "run/export", "export", {"serving": {"vLLM": "vllm serve 'T'"}}, "draftmill.json")
    lines = [json.dumps({"step": step, "loss": 9 / step, "acceptance": 1 + step / 50}) for step in range(1, 51)]
    (tmp_path / "run/train").mkdir()
    (tmp_path / "run/train/metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 51, "lo')
    return tmp_path / "run"


def test_the_page_tells_figures_of_every_room_and_says_who_is_missing(line, tmp_path):
    told = run(ReportSettings(input=str(line), output=str(tmp_path / "out/report.html")))
    html = (tmp_path / "out/report.html").read_text()
    assert told["missing"] == ["train"]
    assert "train: missing" in html
    for text in ("1,234", "98,765", "34 no answer", "2.500 of 4", "untrained 1.010", "tied-1", "vllm serve", "1,190"):
        assert text in html, text
    assert "single-token answers only" in html
    assert html.count("<polyline") == 2
    assert told["steps"] == 50


def test_nothing_is_loaded_from_elsewhere_and_text_is_escaped(line, tmp_path):
    run(ReportSettings(input=str(line), output=str(tmp_path / "report.html")))
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert not re.search(r"https?:|src=|href=|url\(|@import", html)


def test_a_run_that_has_only_begun_has_a_page_too(tmp_path):
    put(tmp_path / "run/completions/all", "generate", TOTALS)
    told = run(ReportSettings(input=str(tmp_path / "run"), output=str(tmp_path / "r.html")))
    assert told["missing"] == ["tokenize", "train", "evaluate", "export"]
    assert "no evaluation here" in (tmp_path / "r.html").read_text()


def test_a_folder_without_any_card_and_a_broken_card_are_named(tmp_path):
    with pytest.raises(InputError, match="holds no card"):
        run(ReportSettings(input=str(tmp_path), output=str(tmp_path / "r.html")))
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(InputError, match=r"card\.json is not a card"):
        run(ReportSettings(input=str(tmp_path), output=str(tmp_path / "r.html")))


def test_a_dry_run_writes_nothing(line, tmp_path):
    told = run(ReportSettings(input=str(line), output=str(tmp_path / "r.html"), dry_run=True))
    assert told["left"] == [str(tmp_path / "r.html")]
    assert not (tmp_path / "r.html").exists()


def test_a_long_run_is_thinned_to_means_and_null_figures_are_passed_over():
    metrics = [{"step": step, "loss": float(step % 2)} for step in range(2 * MAX_POINTS)] + [
        {"step": 999, "loss": None}
    ]
    found = curve("loss", metrics, "loss")
    assert found is not None
    assert len(found.points.split()) == MAX_POINTS
    assert (found.low, found.high, found.last_step) == (0.5, 0.5, 2 * MAX_POINTS - 1)
    assert curve("loss", [{"step": 1, "loss": None}], "loss") is None


def test_a_curve_runs_from_left_to_right_and_high_values_lie_on_top():
    found = curve("x", [{"step": 1, "x": 2.0}, {"step": 3, "x": 4.0}], "x")
    assert found is not None
    assert found.points == "0.0,200.0 640.0,0.0"


def test_every_training_run_has_curves_of_its_own(line: Path, tmp_path: Path) -> None:
    (line / "another").mkdir()
    strange = 'hello\n[1]\n\n{"loss": 3}\n{"step": "x", "loss": 3}\n{"step": 3}\n'  # what others have written there
    (line / "another/metrics.jsonl").write_text('{"step": 1, "loss": 7.5}\n' + strange + '{"step": 2, "loss": 7.25}\n')
    told = run(ReportSettings(input=str(line), output=str(tmp_path / "report.html")))
    html = (tmp_path / "report.html").read_text()
    assert told["steps"] == 52 and html.count("<polyline") == 3
    assert "another: loss: 7.250 at step 2" in html and "train: loss: 0.180 at step 50" in html
