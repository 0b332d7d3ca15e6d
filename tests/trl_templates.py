"""The chat templates of the package `trl` (its files, never its code), with a tiny tokenizer that knows their marks."""

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

from tiny_tokenizer import write_tiny_tokenizer

try:
    _FILES = {Path(file.name).stem: file for file in files("trl") or [] if file.suffix == ".jinja"}
except PackageNotFoundError:
    _FILES = {}
NAMES = sorted(_FILES)
needs_trl = pytest.mark.skipif(not NAMES, reason="trl's files are not installed here")

BOS = "<|begin_of_text|>"
# What the families end a turn with.
ENDS = (
    "<|END_RESPONSE|>",
    *("<|end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|eom|>", "<|END_OF_TURN_TOKEN|>", "</s>"),
    *(
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|eom_id|>",
    ),
)


# Refused by find_borders: parts instead of text, an earlier answer's thinking lost at once, no token behind an answer.
REFUSED = {
    *("llava_next", "idefics3", "smolvlm", "deepseek_r1_distill", "deepseekv3", "glm4moe"),
    *("llava_next_training", "idefics3_training", "smolvlm_training", "glm4moe_training"),
    *("deepseek_r1_distill_training", "deepseekv3_training"),
}


def write_trl_folder(folder: Path, name: str) -> Path:
    """A folder with the template `name` and a tokenizer."""
    write_tiny_tokenizer(folder, thinking=True, special=(BOS, *ENDS))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": BOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_bytes(Path(str(_FILES[name].locate())).read_bytes())
    return folder
