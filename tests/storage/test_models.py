"""What a target's config.json says is read in one way, and a file that says nothing is named, not traced."""

import json
from pathlib import Path

import pytest

from draftmill.contracts.errors import InputError
from draftmill.storage.models import fingerprint, in_full, read_config, text_config


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"hidden_size": 8}, {"hidden_size": 8}),
        ({"hidden_size": 8, "text_config": None}, {"hidden_size": 8, "text_config": None}),
        (
            {"dtype": "bfloat16", "vocab_size": 1, "text_config": {"vocab_size": 2}},
            {"dtype": "bfloat16", "vocab_size": 2},
        ),
    ],
)
def test_the_text_models_values_stand_before_the_wrappers(tmp_path: Path, config: dict, text: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config
    assert text_config(tmp_path).items() >= text.items()


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path} holds no config.json"):
        text_config(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path} holds no config.json"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_other_weights_are_another_target_in_either_format(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"some weights")
    before = fingerprint(tmp_path)
    (tmp_path / name).write_bytes(b"more weights")
    assert fingerprint(tmp_path) != before


def test_pickles_beside_safetensors_do_not_count_as_nobody_loads_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"a": "\xff"}'])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=r"config\.json is not a JSON object"):
        text_config(tmp_path)


def test_a_local_target_is_named_so_that_it_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert in_full("org/model") == in_full("./org/model") == str(tmp_path / "org" / "model")
    assert [in_full(name) for name in ("org/other", "package:llm-x")] == ["org/other", "package:llm-x"]
