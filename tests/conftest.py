"""Nothing heavy at import: the fast tests run without torch."""

import importlib.util
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported, here and in the processes tests start: two threads that spin on shared cores cost 20-fold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_NEEDS_TORCH = re.compile(r"^pytestmark = .*pytest\.mark\.torch", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch, files of which every test needs it are passed over before they import it."""
    if collection_path.suffix != ".py" or importlib.util.find_spec("torch") is not None:
        return None
    return True if _NEEDS_TORCH.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.fixture
def s3_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty folder in a bucket of an S3-compatible server on loopback, with the environment that names it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method)).read()
    yield "s3://bucket/some/folder"
    server.stop()
