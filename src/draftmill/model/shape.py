"""What a drafter looks like: sizes, taps, block, layer types; to and from the z-lab `config.json`.

The layout loads in vLLM, SGLang and PyPI `dflash`: Qwen3 keys at the top level, taps and mask id under
`dflash_config`, rope theta in its flat and its nested form, what a kind of drafter adds in both places too. Engines
apply a given `is_causal` to every layer, so it is null where full and sliding layers are mixed: each layer's type then
decides.
"""

from dataclasses import dataclass
from typing import Any

from draftmill.contracts.errors import InputError
from draftmill.contracts.taps import check_tap_ids

PLAIN_ARCHITECTURE = "DFlashDraftModel"
FULL = "full_attention"
SLIDING = "sliding_attention"
# What dflash_config holds for every kind of drafter; more is its kind's own.
_FLASH_KEYS = {"mask_token_id", "target_layer_ids", "sample_from_anchor"}


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes a drafter's parameters and how it attends; `block_size` counts the anchor."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    vocab_size: int
    block_size: int
    tap_ids: tuple[int, ...]
    mask_id: int
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    architecture: str = PLAIN_ARCHITECTURE
    """The kind of drafter: which head (`heads.py`)."""
    head_config: tuple[tuple[str, int | float | bool | str], ...] = ()
    """What the kind's own parameters are sized by, ascending by name; empty for plain DFlash."""

    def __post_init__(self) -> None:
        check_tap_ids(self.tap_ids, self.num_target_layers)
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - {FULL, SLIDING}:
            raise InputError(f"layer_types {list(self.layer_types)} must name {self.num_layers} of {FULL}, {SLIDING}")
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise InputError(f"sliding_window = {self.sliding_window} does not go with layers {list(self.layer_types)}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InputError(
                f"{self.num_heads} heads over {self.num_kv_heads} key-value heads of {self.head_dim}: heads must be a "
                "multiple of key-value heads, and head_dim even"
            )
        if self.block_size < 2:
            raise InputError(f"block_size {self.block_size} leaves nothing to draft: at least 2")

    @property
    def num_taps(self) -> int:
        """Target layers read, K."""
        return len(self.tap_ids)

    @property
    def is_causal(self) -> bool | None:
        """Whether blocks are causal inside: False when all layers are full, True when all slide, None when mixed."""
        return (self.layer_types[0] == SLIDING) if len(set(self.layer_types)) == 1 else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How far back each layer looks, in tokens, itself included; None for full attention layers."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    def to_config(self) -> dict[str, Any]:
        """The `config.json` of the z-lab layout."""
        return {
            **dict(self.head_config),
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_id,
                "target_layer_ids": list(self.tap_ids),
                "sample_from_anchor": False,
                **dict(self.head_config),
            },
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "is_causal": self.is_causal,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "sample_from_anchor": False,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": self.sliding_window is not None,
            "vocab_size": self.vocab_size,
        }

    @staticmethod
    def from_config(config: dict[str, Any], where: str = "config.json") -> "DrafterShape":
        """The shape a z-lab config describes; InputError for a key that is missing or a convention that is not ours."""
        flash = _key(config, "dflash_config", where)
        if config.get("sample_from_anchor", flash.get("sample_from_anchor", False)):
            raise InputError(f"{where}: sample_from_anchor is true; only drafters whose slot 0 is the known anchor run")
        theta = config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta"))
        if theta is None:
            raise InputError(f"{where} names no rope_theta, neither flat nor under rope_parameters")
        layer_types = tuple(_key(config, "layer_types", where))
        architecture = config.get("architectures", [PLAIN_ARCHITECTURE])[0]
        own = {} if architecture == PLAIN_ARCHITECTURE else {k: v for k, v in flash.items() if k not in _FLASH_KEYS}
        shape = DrafterShape(
            hidden_size=_key(config, "hidden_size", where),
            num_layers=_key(config, "num_hidden_layers", where),
            num_heads=_key(config, "num_attention_heads", where),
            num_kv_heads=_key(config, "num_key_value_heads", where),
            head_dim=_key(config, "head_dim", where),
            intermediate_size=_key(config, "intermediate_size", where),
            rms_norm_eps=_key(config, "rms_norm_eps", where),
            rope_theta=theta,
            max_positions=_key(config, "max_position_embeddings", where),
            vocab_size=_key(config, "vocab_size", where),
            block_size=_key(config, "block_size", where),
            tap_ids=tuple(_key(flash, "target_layer_ids", where)),
            mask_id=_key(flash, "mask_token_id", where),
            num_target_layers=_key(config, "num_target_layers", where),
            layer_types=layer_types,
            # Qwen3 configs may carry a window that no layer uses.
            sliding_window=config.get("sliding_window") if SLIDING in layer_types else None,
            architecture=architecture,
            head_config=tuple(sorted(own.items())),
        )
        if config.get("is_causal") not in (None, shape.is_causal):
            raise InputError(
                f"{where}: is_causal = {config['is_causal']} with layers {list(layer_types)}; here a sliding layer is "
                "causal inside the block and a full one is not"
            )
        return shape


def _key(config: dict[str, Any], name: str, where: str) -> Any:
    if name not in config:
        raise InputError(f"{where} names no {name}: it is not the config of a DFlash drafter")
    return config[name]
