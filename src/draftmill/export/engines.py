"""How serving engines read a drafter's config.json, and the commands that serve it, from one definition.

Each reader follows one engine's own order of looking, and fails where the engine would guess: a guessed layer or mask
loads cleanly and is accepted rarely. SGLang: speculative/dflash_utils.py, 00731f0b; vLLM: models/qwen3_dflash.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from draftmill.contracts.errors import InputError
from draftmill.model.shape import DrafterShape

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """What decides acceptance, as an engine understood it; `tap_ids` in our numbering (after 0-based layer i)."""

    architecture: str
    tap_ids: tuple[int, ...]
    mask_id: int
    block_size: int
    rope_theta: float
    sizes: tuple[int, ...]
    """Hidden size, layers, heads, key-value heads, head_dim, feed-forward width, vocabulary."""


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def as_trained(shape: DrafterShape) -> Served:
    """What every engine has to understand."""
    sizes = (shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return Served(
        architecture=shape.architecture,
        tap_ids=shape.tap_ids,
        mask_id=shape.mask_id,
        block_size=shape.block_size,
        rope_theta=shape.rope_theta,
        sizes=(*sizes, shape.intermediate_size, shape.vocab_size),
    )


def read_as_sglang(config: Config) -> Served:
    """SGLang looks under `dflash_config` and then at the top level; theta lies at the top level."""
    flash = config.get("dflash_config") or {}
    merged = {**config, **flash}
    return _served(merged, tap_ids=merged["target_layer_ids"], rope_theta=config["rope_theta"])


def read_as_vllm(config: Config) -> Served:
    """vLLM looks under `dflash_config` alone (and adds one to layer ids itself), theta lies in `rope_parameters`."""
    flash = config["dflash_config"]
    nested = {**config, "mask_token_id": flash["mask_token_id"]}
    return _served(nested, tap_ids=flash["target_layer_ids"], rope_theta=config["rope_parameters"]["rope_theta"])


def read_as_dflash(config: Config) -> Served:
    """PyPI dflash looks under `dflash_config` and then at the top level; theta by way of transformers' Qwen3Config."""
    merged = {**config, **config.get("dflash_config", {})}
    return _served(merged, tap_ids=merged["target_layer_ids"], rope_theta=config["rope_parameters"]["rope_theta"])


def _served(config: Config, *, tap_ids: Any, rope_theta: Any) -> Served:
    if config["model_type"] != "qwen3" or len(config["architectures"]) != 1:
        raise InputError(f"model_type {config['model_type']!r}, architectures {config['architectures']!r}: not served")
    if config.get("sample_from_anchor", False):
        raise InputError("sample_from_anchor is true: slot 0 would be drafted, but it is the known anchor")
    return Served(
        architecture=config["architectures"][0],
        tap_ids=tuple(tap_ids),
        mask_id=config["mask_token_id"],
        block_size=config["block_size"],
        rope_theta=rope_theta,
        sizes=tuple(config[name] for name in _SIZES),
    )


READERS: dict[str, Callable[[Config], Served]] = {
    "vLLM": read_as_vllm,
    "SGLang": read_as_sglang,
    "dflash": read_as_dflash,
}


def check_config(config: Config, shape: DrafterShape) -> None:
    """InputError naming the engine and what it would lack or misread in this config."""
    for engine, read in READERS.items():
        try:
            found = read(config)
        except KeyError as error:
            raise InputError(f"{engine} would find no {error} in this config.json and guess or refuse") from error
        if found != as_trained(shape):
            raise InputError(f"{engine} would read {found} out of this config.json; trained is {as_trained(shape)}")


def serving_commands(target: str, folder: str, block_size: int) -> dict[str, str]:
    """The commands that serve `target` with the drafter in `folder`.

    A block of B slots drafts B - 1 tokens. vLLM counts the drafts, SGLang the slots: the same block, one apart.
    """
    num_drafts = block_size - 1
    spec = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": num_drafts})
    launch = f"python -m sglang.launch_server --model-path {quote(target)} --speculative-algorithm DFLASH"
    draft = f"--speculative-draft-model-path {quote(folder)} --speculative-num-draft-tokens {num_drafts + 1}"
    return {
        "vLLM": f"vllm serve {quote(target)} --speculative-config {quote(spec)}",
        "SGLang": f"{launch} {draft}",
    }
