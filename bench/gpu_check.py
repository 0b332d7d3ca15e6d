"""What only a GPU can show, on one of them, in less than five minutes: `python bench/gpu_check.py`.

    attention   flex against dense SDPA: values and gradients, full and sliding layers, float32 and bfloat16
    features    in bfloat16: hooks are hidden_states bit for bit, rows in a batch are rows alone, float32's are near
    step        steps of a Qwen3-8B-shaped drafter, 512 anchors of 16: tokens/s, share of the peak, memory, compilations
    overlap     the target's forward on one CUDA stream beside the drafter's steps on another
    spread      features of a target over two CUDA devices (over one and the disk) are those it had, bit for bit
    rooms       `draftmill train` and `evaluate` themselves, at tiny sizes (gpu_rooms.py)

Without a GPU the same code runs at tiny sizes, so that it is known to run; what needs CUDA says so. Exits with 1 where
a check fails; the last line is the figures as JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_rooms import check_rooms
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftmill.extract.spread import ends_on, spread
from draftmill.extract.taps import TapReader
from draftmill.extract.target import Target, freeze
from draftmill.model.attention import Attend, DenseAttention
from draftmill.model.drafter import Drafter
from draftmill.model.flex import FlexAttention, FlexKernels, compiled_kernels
from draftmill.model.forms import attention_form
from draftmill.model.mask import BlockLayout
from draftmill.model.shape import DrafterShape
from draftmill.settings.train import TrainSettings
from draftmill.train.batches import Batch
from draftmill.train.loop import LossOf
from draftmill.train.start import drafter_shape

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
BLOCK, MASK_ID = 16, 5
# Float32 kernels sum in another order; bfloat16 ones may err from float32 by twice what SDPA errs by,
# and two roundings.
FLOAT32_ERROR, BFLOAT16_TIMES, BFLOAT16_FLOOR = 2e-5, 2.0, 8e-3
# Mask and kernels are compiled in the first steps, and nothing after that, whatever the anchors.
MAX_LATE_COMPILATIONS = 0
MIN_COSINE = 0.99


@dataclass(frozen=True)
class Sizes:
    """How large things are: a Qwen3-8B with a few of its layers and a drafter for it, or toys."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    target_layers: int
    layers: int
    taps: int
    context: int
    anchors: int
    attention_context: int
    steps: int
    peak: int
    """Rows of the matrix product that is taken for the device's peak."""


QWEN3_8B = Sizes(4_096, 32, 8, 128, 12_288, 151_936, 12, 5, 5, 3_072, 512, 2_500, 8, 8_192)
TOY = Sizes(64, 4, 2, 16, 96, 384, 8, 2, 3, 160, 12, 150, 2, 256)
SIZES = QWEN3_8B if IS_CUDA else TOY


@dataclass
class Findings:
    """What was looked at, and whether all of it was right."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def tell(self, name: str, figure: Any, *, is_good: bool = True, unit: str = "") -> None:
        """Prints and keeps one figure; a bad one is a fault."""
        shown = f"{figure:,.6g}" if isinstance(figure, float) else str(figure)
        print(f"  {name:<58}{shown:>14} {unit}{'' if is_good else '   <-- WRONG'}", flush=True)
        self.figures[name] = figure
        if not is_good:
            self.faults.append(name)


def wait() -> None:
    """Until the device has done what it was told."""
    if IS_CUDA:
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Wall time of one call, over some of them."""
    wait()
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    wait()
    return (time.perf_counter() - start) / rounds


# Attention ------------------------------------------------------------------------------------------------------------


def packed_row(context: int, num_blocks: int, seed: int) -> BlockLayout:
    """Two documents and a tail that fills up, anchors in both, a few padding blocks."""
    generator = torch.Generator().manual_seed(seed)
    first, second = context // 2, context // 3
    documents_T = torch.tensor([0] * first + [1] * second + [-1] * (context - first - second))
    positions_T = torch.cat([torch.arange(first), torch.arange(second), torch.zeros(context - first - second).long()])
    anchors_N = torch.randperm(first + second, generator=generator)[: num_blocks - 3].sort().values
    padded_N = torch.cat([anchors_N, torch.full((num_blocks - len(anchors_N),), -1)])
    return BlockLayout(padded_N, documents_T, positions_T, BLOCK).to(DEVICE)


def attended(attend: Attend, given: list[Tensor], window: int | None, *, has_gradients: bool) -> list[Tensor]:
    """Output and gradients of queries, keys and values, in float32."""
    inputs = [tensor.detach().clone().requires_grad_(has_gradients) for tensor in given[:3]]
    output = attend(*inputs, window)
    if not has_gradients:
        return [output.float()]
    output.backward(given[3].to(output.dtype))
    return [output.detach().float(), *(tensor.grad.float() for tensor in inputs if tensor.grad is not None)]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, in units of what is compared."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def check_attention(findings: Findings) -> None:
    """Flex against SDPA under the dense mask: in float32, and both in bfloat16 against that."""
    layout = packed_row(SIZES.attention_context, 40, seed=0)
    num_slots = layout.num_blocks * BLOCK
    torch.manual_seed(1)
    queries, grad = (torch.randn(SIZES.heads, num_slots, SIZES.head_dim, device=DEVICE) for _ in "qg")
    num_keys = SIZES.attention_context + num_slots
    keys, values = (torch.randn(SIZES.kv_heads, num_keys, SIZES.head_dim, device=DEVICE) for _ in "kv")
    given = [queries, keys, values, grad]
    narrow = [tensor.bfloat16() for tensor in given]
    windows = [None, SIZES.attention_context // 5]
    kernels = compiled_kernels(DEVICE.index or 0, SIZES.head_dim) if IS_CUDA else FlexKernels()
    flex, dense = FlexAttention(layout, windows, kernels), DenseAttention(layout)
    for window in windows:
        kind = "full" if window is None else "sliding"
        truth = attended(dense, given, window, has_gradients=IS_CUDA)
        error = worst(attended(flex, given, window, has_gradients=IS_CUDA), truth)
        findings.tell(f"flex, {kind}, float32, error", error, is_good=error <= FLOAT32_ERROR)
        plain = worst(attended(dense, narrow, window, has_gradients=IS_CUDA), truth)
        error = worst(attended(flex, narrow, window, has_gradients=IS_CUDA), truth)
        is_good = error <= BFLOAT16_TIMES * plain + BFLOAT16_FLOOR
        findings.tell(f"flex, {kind}, bfloat16, error", error, is_good=is_good, unit=f"(SDPA {plain:.1e})")
    findings.tell("gradients compared", IS_CUDA, unit="" if IS_CUDA else "(flex has a backward on CUDA only)")


# Features -------------------------------------------------------------------------------------------------------------


def random_target(dtype: torch.dtype) -> Target:
    """A target of these sizes with random weights."""
    config = Qwen3Config(
        **{"vocab_size": SIZES.vocab, "hidden_size": SIZES.hidden, "num_hidden_layers": SIZES.target_layers},
        **{"num_attention_heads": SIZES.heads, "num_key_value_heads": SIZES.kv_heads, "head_dim": SIZES.head_dim},
        **{"intermediate_size": SIZES.width, "max_position_embeddings": 8_192, "rms_norm_eps": 1e-6},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": dtype},
    )
    with torch.device(DEVICE):
        torch.manual_seed(0)
        return freeze(Qwen3ForCausalLM(config).to(dtype))


def check_features(target: Target, tap_ids: tuple[int, ...], findings: Findings) -> None:
    """Features in bfloat16: hooks against hidden states, a batch against alone, and against float32."""
    generator = torch.Generator().manual_seed(2)
    lengths_R = torch.tensor([SIZES.context // 4, SIZES.context // 5], device=DEVICE)
    ids_RT = torch.randint(SIZES.vocab, (2, SIZES.context // 4), generator=generator).to(DEVICE)
    reader = TapReader(target, tap_ids)
    together = reader.read(ids_RT, lengths_R)
    with torch.no_grad():
        states = target.backbone(input_ids=ids_RT, use_cache=False, output_hidden_states=True).hidden_states
    tapped = torch.cat([states[tap + 1] for tap in tap_ids], dim=-1)
    is_same = torch.equal(together[0], tapped[0])
    findings.tell("hooks are hidden_states[i + 1] bit for bit", is_same, is_good=is_same)
    length = int(lengths_R[1])
    alone = reader.read(ids_RT[1:, :length], lengths_R[1:])[0]
    cosine = least_cosine(together[1, :length], alone)
    findings.tell("a row in a batch and alone, least cosine of a token", cosine, is_good=cosine >= MIN_COSINE)
    target.model.float()
    wide = reader.read(ids_RT[1:, :length], lengths_R[1:])[0]
    target.model.to(alone.dtype)
    cosine = least_cosine(alone, wide)
    findings.tell("bfloat16 and float32, least cosine of a token", cosine, is_good=cosine >= MIN_COSINE)


def least_cosine(some_TF: Tensor, others_TF: Tensor) -> float:
    """Over the tokens, the least cosine between two readings of one."""
    return float(nn.functional.cosine_similarity(some_TF.float(), others_TF.float(), dim=-1).min())


# Steps ----------------------------------------------------------------------------------------------------------------


class Trainer:
    """Training steps of a drafter on random features: fresh anchors every step, shapes that stay."""

    def __init__(self, target: Target, shape: DrafterShape, settings: TrainSettings) -> None:
        with torch.device(DEVICE):
            self.drafter = Drafter(shape)
        for parameter in self.drafter.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, fused=IS_CUDA)
        self._loss_of = LossOf(target, settings, (), attention_form("auto", shape, DEVICE))
        self._features_TF = torch.randn(SIZES.context, SIZES.taps * SIZES.hidden, device=DEVICE).bfloat16()
        self._step = 0

    def step(self) -> None:
        """One step: forward, backward, AdamW."""
        self._step += 1
        loss = self._loss_of(self.drafter, self._batch())
        (loss.nats / loss.weight).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _batch(self) -> Batch:
        layout = packed_row(SIZES.context, SIZES.anchors, seed=self._step)
        is_real_N1 = layout.anchors_N[:, None] >= 0
        block_ids_NB = torch.full((SIZES.anchors, BLOCK), MASK_ID, device=DEVICE)
        labels_NJ = torch.randint(SIZES.vocab, (SIZES.anchors, BLOCK - 1), device=DEVICE)
        return Batch(self._features_TF, block_ids_NB, layout, labels_NJ, is_real_N1.expand(-1, BLOCK - 1))


def step_flop(shape: DrafterShape, layout: BlockLayout) -> float:
    """Operations of one step that the mathematics asks for: matrices, what slots see, and the head."""
    slots, context, hidden = layout.num_blocks * BLOCK, layout.context_len, shape.hidden_size
    channels, kv_channels = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = slots * (2 * channels + 3 * shape.intermediate_size) + (slots + context) * 2 * kv_channels
    starts_N = layout.anchors_N.clamp(min=0)
    pairs = BLOCK * float((layout.positions_T[starts_N] + BLOCK).sum())
    layers = shape.num_layers * 3 * (2 * hidden * matrices + 4 * channels * pairs)
    head = 4 * float((layout.anchors_N >= 0).sum()) * (BLOCK - 1) * hidden * shape.vocab_size
    return layers + 4 * context * shape.num_taps * hidden * hidden + head


def peak_flop_per_s() -> float:
    """What a bfloat16 matrix product reaches on this device (float32 where there is no GPU)."""
    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    left, right = (torch.randn(SIZES.peak, SIZES.peak, device=DEVICE, dtype=dtype) for _ in "lr")
    left @ right
    return 2 * SIZES.peak**3 / seconds(lambda: left @ right, 5)


def compilations() -> int:
    """Graphs compiled so far in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check_step(trainer: Trainer, findings: Findings) -> None:
    """Speed, memory and compilations of whole steps."""
    shape = trainer.drafter.shape
    trainer.step()
    trainer.step()
    wait()
    compiled = compilations()
    if IS_CUDA:
        torch.cuda.reset_peak_memory_stats()
    spent_s = seconds(trainer.step, SIZES.steps)
    flop, peak = step_flop(shape, packed_row(SIZES.context, SIZES.anchors, seed=0)), peak_flop_per_s()
    findings.tell("parameters trained", sum(p.numel() for p in trainer.drafter.parameters()) / 1e9, unit="billion")
    findings.tell("a step", 1e3 * spent_s, unit="ms")
    findings.tell("context tokens", SIZES.context / spent_s, unit="a second")
    findings.tell("block positions", SIZES.anchors * BLOCK / spent_s, unit="a second")
    findings.tell("operations of a step", flop / 1e12, unit="TFLOP")
    findings.tell("matrix-multiply peak", peak / 1e12, unit="TFLOP/s")
    findings.tell("share of the peak", flop / spent_s / peak)
    if IS_CUDA:
        findings.tell("memory at the peak", torch.cuda.max_memory_allocated() / 1e9, unit="GB")
    late = compilations() - compiled
    findings.tell("compilations after two steps", late, is_good=late <= MAX_LATE_COMPILATIONS)


# Overlap --------------------------------------------------------------------------------------------------------------


@contextmanager
def beside(stream: Any) -> Iterator[None]:
    """Work on a stream of its own that begins after what was told before."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def check_overlap(reader: TapReader, trainer: Trainer, findings: Findings) -> None:
    """The target and the drafter one after the other, and side by side on two streams."""
    ids_RT = torch.randint(SIZES.vocab, (1, SIZES.context), device=DEVICE)
    lengths_R = torch.tensor([SIZES.context], device=DEVICE)
    side = torch.cuda.Stream() if IS_CUDA else None

    def both() -> None:
        with beside(side):
            reader.read(ids_RT, lengths_R)
        trainer.step()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    reader.read(ids_RT, lengths_R)
    target_s = seconds(lambda: reader.read(ids_RT, lengths_R), SIZES.steps)
    drafter_s, both_s = seconds(trainer.step, SIZES.steps), seconds(both, SIZES.steps)
    findings.tell("target alone", 1e3 * target_s, unit="ms")
    findings.tell("drafter alone", 1e3 * drafter_s, unit="ms")
    findings.tell("both" + (", on two streams" if IS_CUDA else ", one after the other"), 1e3 * both_s, unit="ms")
    findings.tell("both, of the sum", both_s / (target_s + drafter_s))
    findings.tell("both, of the slower one", both_s / max(target_s, drafter_s))


# Spread ---------------------------------------------------------------------------------------------------------------


def check_spread(reader: TapReader, findings: Findings) -> None:
    """Features of a target over two devices, or one and the disk, are those it had before; the target stays spread."""
    ids_RT = torch.randint(SIZES.vocab, (2, SIZES.context // 4), device=DEVICE)
    lengths_R = torch.tensor([SIZES.context // 4, SIZES.context // 5], device=DEVICE)
    whole = reader.read(ids_RT, lengths_R)
    here = "cuda:0" if IS_CUDA else "cpu"
    places = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else (here, "disk", here)
    with TemporaryDirectory() as folder:
        spread(reader.target, places, Path(folder))
        is_same = torch.equal(reader.read(ids_RT, lengths_R), whole)
    findings.tell("features of a spread target are its own", is_same, is_good=is_same, unit=f"({', '.join(places)})")
    lent = ends_on(reader.target, torch.device(here))
    is_here = all(part.weight.device == torch.device(here) for part in (lent.embed, lent.norm, lent.head))
    findings.tell("what a drafter borrows of it lies on one device", is_here, is_good=is_here)


def main() -> None:
    """Looks at everything; exits with 1 where something is wrong."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    findings = Findings()
    name = torch.cuda.get_device_name() if IS_CUDA else "no GPU: tiny sizes, on the CPU"
    print(f"{name}; torch {torch.__version__}\nattention")
    check_attention(findings)
    target = random_target(torch.bfloat16)
    settings = TrainSettings(
        **{"input": "set", "output": ("run",), "target": "random", "block_size": BLOCK, "compute_dtype": "bfloat16"},
        **{"num_layers": SIZES.layers, "num_taps": SIZES.taps},  # type: ignore[arg-type]
    )
    shape = drafter_shape(target, settings, MASK_ID)
    reader = TapReader(target, shape.tap_ids)
    print("features")
    check_features(target, shape.tap_ids, findings)
    print("step")
    trainer = Trainer(target, shape, settings)
    check_step(trainer, findings)
    print("overlap")
    check_overlap(reader, trainer, findings)
    print("spread")
    check_spread(reader, findings)
    print("rooms")
    check_rooms(findings.tell)
    figures = {**findings.figures, "device": name, "sizes": asdict(SIZES), "seconds": time.perf_counter() - start}
    print(json.dumps({"bench": "gpu_check", "faults": findings.faults, **figures}))
    sys.exit(1 if findings.faults else 0)


if __name__ == "__main__":
    main()
