"""The room reads from and writes to an object store as it does to a disk, both outputs at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import completions
from completions import row, write_rows
from draftmill.settings.inspect import InspectSettings
from draftmill.storage.store import open_store
from draftmill.tokenize.inspect import run as inspect
from draftmill.tokenize.run import run
from tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket on a server of its own on loopback."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "DRAFTMILL_CACHE": str(tmp_path / "cache"),
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3 = pytest.importorskip("boto3")
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="lake")
    yield "s3://lake"
    server.stop()


def test_two_outputs_are_both_complete_and_equal_and_a_set_is_read_back(tmp_path: Path, bucket: str):
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    source = write_rows(tmp_path / "a.jsonl", [row(i) for i in range(9)])
    open_store(f"{bucket}/in").put("a.jsonl", source)
    outputs = (str(tmp_path / "samples"), f"{bucket}/samples")
    chosen = completions.settings(
        tmp_path, source, tokenizer, input=f"{bucket}/in", output=outputs, part_bytes=400, workers=2
    )

    card = run(chosen)

    here, there = open_store(outputs[0]), open_store(outputs[1])
    names = [file.key for file in here.files()]
    assert names == [file.key for file in there.files()]
    assert {"plan.json", "card.json", "state.json", "dataset_info.json", "part-00000.arrow"} <= set(names)
    assert [here.get(name) for name in names] == [there.get(name) for name in names]
    assert run(chosen) == card
    assert inspect(InspectSettings(input=outputs[1]))["tokens"] == card["content"]["tokens"]

    # Lost from one of the two: made again, for that one.
    there.delete(["part-00001.json", "card.json"])
    assert run(chosen)["content_hash"] == card["content_hash"]
    assert here.get("part-00001.json") == there.get("part-00001.json")
