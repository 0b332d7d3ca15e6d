"""Promise: a local folder and an S3 bucket behave alike; what is missing or wrong is named with its place."""

from pathlib import Path

import obstore
import pytest

from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.storage.store import Store, open_store


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


def test_more_than_one_page_of_objects_is_listed(s3_url: str) -> None:
    store = open_store(s3_url)
    for index in range(1_005):
        obstore.put(store.backend, f"{index:05d}", b"")
    assert len(store.files()) == 1_005


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
    with pytest.raises(RecipeError, match="names no bucket"):
        open_store("s3://")
    with pytest.raises(StorageError, match="cannot be made"):
        open_store(str(tmp_path / "file" / "below"), create=True)
