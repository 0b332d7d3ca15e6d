"""Features may come from elsewhere: an extractor is one method, and what trains does not ask what stands behind it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from draftmill.extract.taps import Extractor, States, TapReader
from draftmill.extract.target import load_target
from draftmill.train.features import TargetFeatures
from draftmill.train.samples import Sample
from tiny import write_tiny_target

pytestmark = pytest.mark.torch

TAPS = (0, 3)


class FarEngine:
    """An engine beyond a wire: JSON requests of one document each in, bytes out, in whatever order it pleases."""

    def __init__(self, reader: TapReader) -> None:
        self._reader = reader
        self.num_asked = 0

    def answers(self, requests: list[str]) -> Iterator[tuple[str, bytes]]:
        for request in sorted(requests, key=len, reverse=True):
            asked = json.loads(request)
            self.num_asked += 1
            ids_1T = torch.tensor([asked["token_ids"]])
            features = self._reader.read(ids_1T, torch.tensor([ids_1T.shape[1]]))[0]
            yield asked["id"], features.numpy().tobytes()


class RemoteExtractor:
    """Asks a far engine for every row by an id of its own, and puts the answers back where they belong."""

    def __init__(self, engine: FarEngine) -> None:
        self._engine = engine

    def read_states(self, input_ids_RT: torch.Tensor, lengths_R: torch.Tensor) -> States:
        lengths = lengths_R.tolist()
        rows = {f"row-{row}": input_ids_RT[row, :length].tolist() for row, length in enumerate(lengths)}
        requests = [json.dumps({"id": name, "token_ids": ids}) for name, ids in rows.items()]
        answers = dict(self._engine.answers(requests))
        assert answers.keys() == rows.keys()
        found = [np.frombuffer(answers[name], dtype=np.float32).reshape(len(ids), -1) for name, ids in rows.items()]
        features = torch.zeros(*input_ids_RT.shape, found[0].shape[1])
        for row, states in enumerate(found):
            features[row, : len(states)] = torch.from_numpy(states.copy())
        return States(features, None)


def test_features_of_a_remote_engine_are_taken_as_those_of_the_target_here(tmp_path: Path) -> None:
    reader = TapReader(load_target(write_tiny_target(tmp_path)), TAPS)
    remote = RemoteExtractor(engine := FarEngine(reader))
    assert isinstance(remote, Extractor) and isinstance(reader, Extractor)
    rng = np.random.default_rng(0)
    samples = [Sample(f"s{n}", rng.integers(0, 250, n), np.ones(n, dtype=np.bool_)) for n in (31, 6, 30, 12, 32, 5)]
    cpu = torch.device("cpu")
    for cache_bytes in (0, 1 << 20):
        here, there = (TargetFeatures(e, cpu, max_tokens=64, cache_bytes=cache_bytes) for e in (reader, remote))
        for one, other in zip(here.states_of(samples), there.states_of(samples), strict=True):
            torch.testing.assert_close(other.features_TF, one.features_TF, rtol=1e-5, atol=1e-5)
            assert other.last_TH is None
    assert engine.num_asked == 2 * len(samples)
