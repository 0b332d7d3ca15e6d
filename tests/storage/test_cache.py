"""The cache lies where it was said to, or where the user's does; a place that cannot be one is named with its cure."""

from pathlib import Path

import pytest

from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.storage.cache import cache_folder
from draftmill.storage.local import expanded


def test_the_cache_is_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("DRAFTMILL_CACHE", "")
    assert cache_folder() == tmp_path / ".cache" / "draftmill"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "draftmill"
    monkeypatch.setenv("DRAFTMILL_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("below", ["", "deep/down"])
def test_a_file_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "file" / below))
    with pytest.raises(StorageError, match=r"cannot be made \(.*/file is a file\).*DRAFTMILL_CACHE"):
        cache_folder()


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(RecipeError, match=r"~nobody-of-that-name/x: .*no home folder"):
        expanded("~nobody-of-that-name/x")
