"""The closing lines of a run say of each acceptance length how it was measured, and over how many answers."""

from draftmill.storage.provenance import Stopwatch
from draftmill.summary import summarize_run

COUNTED = {"rows": 5, "tokens": 50, "dropped": {}}
TAU = {"tau": 2.5, "tau_micro": 2.25, "num_requests": 5}
RUN = {"seconds": 1.0, "cpu_seconds": 1.0}


def told(**changed: object) -> str:
    found = {**COUNTED, **TAU, "block_size": 4, "num_decoded": 3, "ties": [], "lossless": True, "tau_untrained": 1.0}
    found |= {"untrained": {"tau": 1.0, "num_requests": 2}, "families": {"a": TAU}, "reported_apart": {}, **changed}
    cards = {
        name: {"content": COUNTED, "run": RUN} for name in ("generate train", "generate held-out", "tokenize", "train")
    }
    cards["evaluate"] = {"content": found, "run": RUN}
    lines, _ = summarize_run(cards, {"train": "t", "export": "e", "report": "r"}, Stopwatch())
    return "\n".join(lines)


def test_walked_and_decoded_figures_are_told_apart() -> None:
    assert "tau 2.50 (micro 2.25), walked along 5 held-out answers; untrained 1.00, decoding 2 of them" in told()
    assert "lossless: 3 held-out answers decoded" in told()
    assert "untrained not measured" in told(untrained=None, tau_untrained=None)
