"""What a run starts from: the drafter's shape, out of the target and the settings, and its first weights."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from draftmill.contracts.errors import RecipeError
from draftmill.contracts.taps import chosen_tap_ids
from draftmill.extract.quantized import is_plain_float
from draftmill.extract.target import Outline, Target, read_outline
from draftmill.model.checkpoint import load_drafter
from draftmill.model.drafter import Drafter
from draftmill.model.shape import FULL, SLIDING, DrafterShape
from draftmill.settings.train import TrainSettings
from draftmill.settings.workers import total_memory_bytes
from draftmill.storage.checkpoints import find_checkpoint
from draftmill.storage.models import CONFIG_FILE, read_config

# Engines' attention kernels for drafters end here; a target beyond it (Qwen3.6: 256) must not be copied.
MAX_COPIED_HEAD_DIM = 128
HEADS_PER_KV_HEAD = 4
DENSE_RATIO = 3
INIT_STD = 0.02
# Around the identity that an fc starts as beside a copied layer: enough for the other taps to begin to count.
COPIED_FC_STD = 0.002
_COPIED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
RANDOM, TARGET = "random", "target"
FLOAT32_BYTES = 4
# What a published config may say otherwise without its weights meaning something else.
_FREE = {"max_positions"}
_COPIED_IF_THERE = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def tap_ids_of(target: Target | Outline, settings: TrainSettings) -> tuple[int, ...]:
    """The target layers that are read: the recipe's, or `num_taps` spread evenly."""
    return chosen_tap_ids(settings.tap_ids, settings.num_taps, target.num_layers)


def drafter_shape(target: Target | Outline, settings: TrainSettings, mask_id: int) -> DrafterShape:
    """The drafter's shape: hidden size, vocabulary and rope theta are the target's, heads by the rule of `_heads`.

    Rotary always spans the whole head: never partial, multi-axis or scaled as the target's may be.
    """
    num_heads, num_kv_heads, head_dim = _heads(target)
    sliding = settings.num_sliding_layers
    return DrafterShape(
        hidden_size=target.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads or num_heads,
        num_kv_heads=settings.num_kv_heads or num_kv_heads,
        head_dim=settings.head_dim or head_dim,
        intermediate_size=settings.intermediate_size or _intermediate_size(target),
        rms_norm_eps=target.config.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_positions=target.max_positions,
        vocab_size=target.vocab_size,
        block_size=settings.block_size,
        tap_ids=tap_ids_of(target, settings),
        mask_id=mask_id,
        num_target_layers=target.num_layers,
        layer_types=(SLIDING,) * sliding + (FULL,) * (settings.num_layers - sliding),
        sliding_window=settings.sliding_window,
    )


def _heads(target: Target | Outline) -> tuple[int, int, int]:
    """Query heads, key-value heads and their channels: the target's, where its heads are no wider than a drafter's.

    Else heads of 128 channels, the largest power of two of them that the hidden size holds, four to a key-value head:
    for Qwen3.6-27B (5,120 wide, heads of 256) that is 32 over 8, as its published drafters have.
    """
    config = target.config.to_dict()
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or target.hidden_size // heads
    if head_dim <= MAX_COPIED_HEAD_DIM:
        return heads, config.get("num_key_value_heads") or heads, head_dim
    num_heads = 1 << max(0, (target.hidden_size // MAX_COPIED_HEAD_DIM).bit_length() - 1)
    return num_heads, max(1, num_heads // HEADS_PER_KV_HEAD), MAX_COPIED_HEAD_DIM


def _intermediate_size(target: Target | Outline) -> int:
    """The target's own; a mixture of experts without a dense layer gets three times the hidden size, as Qwen3 has."""
    return target.config.to_dict().get("intermediate_size") or DENSE_RATIO * target.hidden_size


def initial_drafter(target: Target, settings: TrainSettings, mask_id: int) -> Drafter:
    """A drafter before its first step, float32, where the target is, the same for the same seed."""
    shape = drafter_shape(target, settings, mask_id)
    refuse_too_large(shape, total_memory_bytes())
    if settings.init not in (RANDOM, TARGET):
        return continued(shape, find_checkpoint(settings.init)).to(target.device)
    drafter = Drafter(shape)
    randomize(drafter, settings.seed)
    if settings.init == TARGET:
        copy_layers(drafter, target)
    return drafter.to(target.device)


def refuse_too_large(shape: DrafterShape, memory_bytes: int) -> None:
    """RecipeError where not even the weights of such a drafter fit into all the memory of this host."""
    one, two = _num_weights(shape, 1), _num_weights(shape, 2)
    num_weights = one + (two - one) * (shape.num_layers - 1)
    if FLOAT32_BYTES * num_weights > memory_bytes:
        raise RecipeError(
            f"a drafter of {num_weights:,} weights takes {FLOAT32_BYTES * num_weights / 1e9:,.0f} GB before it learns "
            f"anything, and this host has {memory_bytes / 1e9:,.0f} GB: lower --num-layers, --intermediate-size, "
            "--num-heads, --num-kv-heads or --head-dim"
        )


def _num_weights(shape: DrafterShape, num_layers: int) -> int:
    """Weights of the drafter with so many layers, all of which are of one size; counted, not made."""
    with torch.device("meta"):
        drafter = Drafter(replace(shape, num_layers=num_layers, layer_types=(FULL,) * num_layers, sliding_window=None))
    return sum(parameter.numel() for parameter in drafter.parameters())


def check_shape(settings: TrainSettings, folder: Path, mask_id: int) -> None:
    """RecipeError where no drafter of the shape asked for fits the target in `folder`, or the one to go on from is of
    another: as far as the config.json files of both tell, before either is loaded.
    """
    shape = drafter_shape(read_outline(folder), settings, mask_id)
    if settings.init not in (RANDOM, TARGET):
        init = find_checkpoint(settings.init)
        found = DrafterShape.from_config(read_config(init), str(init / CONFIG_FILE))
        _refuse_another_shape(init, found, shape)


def continued(shape: DrafterShape, folder: Path) -> Drafter:
    """The drafter in `folder`, to be trained further; RecipeError naming what differs from the shape asked for."""
    drafter = load_drafter(folder).float().train().requires_grad_(True)
    _refuse_another_shape(folder, drafter.shape, shape)
    drafter.shape = shape
    return drafter


def _refuse_another_shape(folder: Path, there: DrafterShape, shape: DrafterShape) -> None:
    found, wanted = asdict(there), asdict(shape)
    differing = [f"{k} {found[k]} instead of {wanted[k]}" for k in wanted if found[k] != wanted[k] and k not in _FREE]
    if differing:
        raise RecipeError(
            f"--init {folder}: the drafter there is of another shape: {'; '.join(differing)}; set these, or start at "
            "random"
        )


def randomize(drafter: Drafter, seed: int) -> None:
    """Normal matrices, norm gains of 1; drawn parameter by parameter from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=INIT_STD, generator=generator)


def source_layers(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Which target layer each drafter layer starts as: the target's last ones, in order."""
    return tuple(range(num_target_layers - num_layers, num_target_layers))


@torch.no_grad()
def copy_layers(drafter: Drafter, target: Target) -> None:
    """Drafter layers and final norm become the target's; RecipeError where a shape differs.

    The context starts as the last tap's feature, normed as the first copied layer norms its input, so that the copied
    keys and values mean at once what they meant in the target. Where the target has no q_norm and k_norm the
    drafter's stay at 1: they keep queries and keys at a length that gives softmax a sensible spread.
    """
    sources = source_layers(drafter.shape.num_layers, target.num_layers)
    for index, source in enumerate(sources):
        wanted = dict(drafter.layers[index].named_parameters())
        given = dict(target.layers[source].named_parameters())
        gains = {f"{name}.weight": m for name, m in target.layers[source].named_modules() if name.endswith("norm")}
        for name in (*_COPIED, *(n for n in _COPIED_IF_THERE if n in given)):
            found = target.family.gain(gains[name]) if name in gains else given.get(name)
            _copy(wanted[name], found, f"layer {source}'s {name}")
    drafter.hidden_norm.weight.copy_(dict(drafter.layers[0].named_parameters())["input_layernorm.weight"])
    _copy(drafter.norm.weight, target.family.gain(target.norm), "norm")
    drafter.fc.weight.mul_(COPIED_FC_STD / INIT_STD)
    drafter.fc.weight[:, -drafter.shape.hidden_size :].diagonal().add_(1.0)


def _copy(into: Tensor, source: Tensor | None, name: str) -> None:
    if source is not None and not is_plain_float(source):
        raise RecipeError(
            f"--init target copies float weights, and the target's {name} is quantized ({source.dtype}): start at "
            "random"
        )
    if source is None or source.shape != into.shape:
        found = "missing" if source is None else str(list(source.shape))
        raise RecipeError(
            f"--init target needs layers of one shape: the target's {name} is {found}, the drafter's "
            f"{list(into.shape)}; leave --num-heads, --num-kv-heads, --head-dim and --intermediate-size "
            "unset, or start at random"
        )
    into.copy_(source)
