"""How large a target is, from its config.json alone: weights and attention work of every decoder layer.

Exact for dense models with grouped-query attention (Llama, Qwen3, …). Mixtures of experts count the experts a token
uses; layers of linear attention (Gated DeltaNet, as in Qwen3.5 and Qwen3.6) count their projections exactly and their
recurrence by `STATE_FLOP_PER_CELL`. Whatever is approximate is said in `TargetSize.notes`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.contracts.errors import InputError
from draftmill.storage.models import CONFIG_FILE, text_config

# Decay, read for the delta rule, write and read for the output: about four multiply-adds per cell of the state.
STATE_FLOP_PER_CELL = 8
# Two products of a query with a key (q·k and weight·v), each a multiply and an add.
FLOP_PER_KEY_CHANNEL = 4


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One decoder layer: `weights` multiplied with every token, and what attention costs beside them."""

    weights: int
    flop_per_key: int
    window: int | None = None
    state_flop: int = 0

    def flop(self, context: float) -> float:
        """Floating-point operations for one token that sees `context` keys."""
        keys = context if self.window is None else min(context, self.window)
        return 2 * self.weights + self.flop_per_key * keys + self.state_flop


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """A target as far as cost goes; `num_heads` and the like are what a drafter takes over unless told otherwise."""

    hidden_size: int
    vocab_size: int
    is_tied: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSize, ...]
    notes: tuple[str, ...]

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.hidden_size * self.vocab_size

    @property
    def borrowed_bytes(self) -> int:
        """Bytes in bfloat16 of what a drafter borrows: embedding and head, one matrix where they are tied."""
        return 2 * self.head_weights * (1 if self.is_tied else 2)

    def forward_flop(self, context: float, num_layers: int | None = None) -> float:
        """Operations for one token through the first `num_layers` layers; through all of them and the head if None."""
        flop = sum(layer.flop(context) for layer in self.layers[:num_layers])
        return flop + (2 * self.head_weights if num_layers is None else 0)


def read_target_size(folder: Path) -> TargetSize:
    """The size of the target whose config.json lies in `folder`; InputError naming the key it lacks."""
    try:
        return target_size(text_config(folder))
    except KeyError as error:
        raise InputError(f"{folder / CONFIG_FILE} has no {error}: its cost cannot be derived") from error


def target_size(text: dict[str, Any]) -> TargetSize:
    """The size that the configuration of a text model describes; KeyError for a key it lacks."""
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head_dim = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    mlp, notes = _mlp_weights(text)
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    if "linear_attention" in kinds:
        notes.append(f"linear-attention recurrence counted as {STATE_FLOP_PER_CELL} operations per state cell")
    return TargetSize(
        hidden_size=hidden,
        vocab_size=text["vocab_size"],
        is_tied=text.get("tie_word_embeddings", False),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=text.get("intermediate_size") or text["moe_intermediate_size"],
        layers=tuple(_layer(kind, text, mlp, heads, kv_heads, head_dim) for kind in kinds),
        notes=tuple(notes),
    )


def _mlp_weights(text: dict[str, Any]) -> tuple[int, list[str]]:
    """Weights of the feed-forward part that one token meets, and what is approximate about them."""
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not experts:
        return 3 * text["hidden_size"] * text["intermediate_size"], []
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    met = text["num_experts_per_tok"] * width + text.get("shared_expert_intermediate_size", 0)
    note = f"mixture of experts: {text['num_experts_per_tok']} of {experts} counted for every token of every layer"
    return text["hidden_size"] * (3 * met + experts), [note]


def _layer(kind: str, text: dict[str, Any], mlp: int, heads: int, kv_heads: int, head_dim: int) -> LayerSize:
    hidden = text["hidden_size"]
    if kind == "linear_attention":
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        gates = 2 * text["linear_num_value_heads"]
        conv = text.get("linear_conv_kernel_dim", 0) * (2 * keys + values)
        weights = hidden * (2 * keys + 3 * values + gates) + conv
        cells = values * text["linear_key_head_dim"]
        return LayerSize(weights=weights + mlp, flop_per_key=0, state_flop=STATE_FLOP_PER_CELL * cells)
    gate = 2 if text.get("attn_output_gate") else 1
    attention = hidden * head_dim * ((gate + 1) * heads + 2 * kv_heads)
    window = text.get("sliding_window") if kind == "sliding_attention" else None
    return LayerSize(weights=attention + mlp, flop_per_key=FLOP_PER_KEY_CHANNEL * heads * head_dim, window=window)
