"""Promise: a local folder and an S3 bucket behave alike; what is missing or wrong is named with its place."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import obstore
import pytest

from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.storage.store import Store, open_store
from storage.seaweed import environment
from storage.unruly_proxy import UnrulyProxy


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path / "store"), create=True)
    return open_store(request.getfixturevalue("s3_url"))


def test_what_is_put_is_listed_and_read_back(store: Store, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(range(256)) * 100)
    store.put("a/b c.txt", b"one")
    store.put("plan.json", tmp_path / "big")
    assert [(f.key, f.size) for f in store.files()] == [("a/b c.txt", 3), ("plan.json", 25600)]
    assert store.get("a/b c.txt") == b"one"
    assert store.find("nothing") is None
    with pytest.raises(StorageError, match="nothing cannot be read"):
        store.get("nothing")


def test_more_than_one_page_of_objects_is_listed(lake: UnrulyProxy) -> None:
    store = open_store(lake.url)
    for index in range(1_005):
        obstore.put(store.backend, f"{index:05d}", b"")
    assert [file.key for file in store.files()] == [f"{index:05d}" for index in range(1_005)]


def test_odd_keys_are_listed_and_read(lake: UnrulyProxy) -> None:
    keys = ["a b.jsonl", "a%20b.jsonl", "ü.jsonl", "a+b#c?d.jsonl", "日本/x y.jsonl", "'q\"(1)&=.jsonl", "%2e%2e"]
    store = open_store(lake.url)
    for key in keys:
        store.put(key, key.encode())
    assert [file.key for file in store.files()] == sorted(keys)
    assert [store.get(key).decode() for key in keys] == keys
    assert [store.span(key, 1, 4) for key in keys] == [key.encode()[1:4] for key in keys]
    assert store.find_all([*keys, "nothing"]) == {key: key.encode() for key in keys}


class _Pages(BaseHTTPRequestHandler):
    """A store whose listing has two pages; a `faulty` one says that more comes, but not where, or the same again."""

    faulty = ""

    def do_GET(self) -> None:
        asked = parse_qs(urlparse(self.path).query)
        is_second = "start-after" in asked or "continuation-token" in asked
        is_repeating = type(self).faulty == "circle"
        keys = ("c", "d") if is_second and not is_repeating else ("a", "b")
        more = (
            "<IsTruncated>true</IsTruncated>" if is_repeating or not is_second else "<IsTruncated>false</IsTruncated>"
        )
        if "true" in more and type(self).faulty != "no token":
            more += "<NextContinuationToken>again</NextContinuationToken>"
        objects = "".join(
            f"<Contents><Key>x/{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag>"
            "<Size>1</Size></Contents>"
            for key in keys
        )
        body = f"<ListBucketResult><Prefix>x/</Prefix>{more}{objects}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        ("no token", r"listing ended after 2 objects, but c comes after them"),
        ("circle", r"listing repeats a: it goes round in circles"),
        ("", ""),
    ],
)
def test_a_listing_that_cannot_be_trusted_is_refused(
    faulty: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Faulty", (_Pages,), {"faulty": faulty}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in environment(server.server_port).items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://lake/x")
    if faulty:
        with pytest.raises(StorageError, match=message):
            store.files()
    else:
        assert [file.key for file in store.files()] == ["a", "b", "c", "d"]
    server.shutdown()
    server.server_close()


def test_a_bucket_that_does_not_exist_is_named(s3_url: str) -> None:
    with pytest.raises(StorageError, match=r"s3://elsewhere/x/plan\.json cannot be written"):
        open_store("s3://elsewhere/x").put("plan.json", b"")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecipeError, match="is a file"):
        open_store(str(tmp_path / "file"), create=True)
    with pytest.raises(RecipeError, match="no such folder"):
        open_store(str(tmp_path / "typo"))
    with pytest.raises(RecipeError, match="a URL is a local path"):
        open_store("ftp://host/x")
    with pytest.raises(RecipeError, match="a URL is a local path"):
        open_store("s3:/bucket/x", create=True)
    with pytest.raises(RecipeError, match="names no bucket"):
        open_store("s3://")
    with pytest.raises(StorageError, match="cannot be made"):
        open_store(str(tmp_path / "file" / "below"), create=True)
