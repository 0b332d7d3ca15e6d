"""A converted folder appears whole or not at all, once, however often and by however many it is asked for."""

import threading
import time
from pathlib import Path

import pytest

from draftmill.extract.convert import make_once

pytestmark = pytest.mark.torch

SOURCE = Path("source.gguf")


def write_two_files(_source: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    time.sleep(0.02)
    (folder / "model.safetensors").write_text("weights")


def test_an_interrupted_conversion_leaves_no_folder_and_is_done_again(tmp_path: Path) -> None:
    folder = tmp_path / "target"

    def dies(_source: Path, draft: Path) -> None:
        draft.mkdir()
        (draft / "stale").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(SOURCE, folder, dies)
    assert not folder.exists()
    make_once(SOURCE, folder, write_two_files)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_of_two_at_once_one_converts_and_both_find_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    conversions, found = [], []

    def convert(source: Path, draft: Path) -> None:
        conversions.append(draft)
        write_two_files(source, draft)

    def ask() -> None:
        make_once(SOURCE, folder, convert)
        found.append((folder / "model.safetensors").is_file())

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(conversions) == 1
    assert found == [True] * 4
