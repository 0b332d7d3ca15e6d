"""The rooms themselves on a device, at tiny sizes, for gpu_check.py.

train       a run cut in the middle and gone on with ends as the whole one, with held-out prompts decoded on the way
evaluate    what it has learnt is decoded losslessly, with a plain target and one of linear attention
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftmill.contracts.errors import DraftmillError
from draftmill.evaluate.run import run as evaluate
from draftmill.extract.target import HYBRID_PACKAGES
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import WEIGHTS_FILE, step_folder
from draftmill.train.run import run as train
from small_run import small_settings, stop_at, write_small_run

IS_CUDA = torch.cuda.is_available()
STEPS, MIDDLE, BLOCK = 20, 10, 16
# On a CPU a run that is gone on with ends in the same bits; where kernels of a GPU add up in no fixed order it may end
# this far off, as a share of how far the weights moved meanwhile.
APART = 0.05 if IS_CUDA else 0.0
# Heads of 64 channels on CUDA, whose kernels want 16 at least.
HIDDEN, DTYPE = (256, "bfloat16") if IS_CUDA else (64, "float32")

Tell = Callable[..., None]
"""`Findings.tell` of gpu_check.py."""


def check_rooms(tell: Tell) -> None:
    """Trains and evaluates for both kinds of target; what a room refuses is a fault."""
    lacking = [name for name in HYBRID_PACKAGES if IS_CUDA and find_spec(name) is None]
    if lacking:
        tell("qwen3_5: not looked at, for lack of", ", ".join(lacking))
    for family in ("llama",) if lacking else ("llama", "qwen3_5"):
        with TemporaryDirectory() as name:
            os.environ["DRAFTMILL_CACHE"] = str(Path(name) / "cache")
            try:
                check_family(family, Path(name), tell)
            except DraftmillError as error:
                tell(f"{family}: {error}", False, is_good=False)


def check_family(family: Literal["llama", "qwen3_5"], place: Path, tell: Tell) -> None:
    """One target's run, once more from its middle, and its evaluation."""
    folder, prompts = write_small_run(place, HIDDEN, family), place / "held-out.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"h{i}", "prompt": f"say {i}"}) + "\n" for i in range(3)))
    settings = run_settings(folder, prompts)
    train(settings)
    stop_at(folder / "whole", folder / "gone on", MIDDLE)
    train(settings.model_copy(update={"output": (str(folder / "gone on"),)}))
    lines = [json.loads(line) for line in (folder / "gone on" / "metrics.jsonl").read_text().splitlines()]
    losses, taus = [line["loss"] for line in lines], [line["tau"] for line in lines if "tau" in line]
    is_sound = len(losses) == STEPS and all(map(isfinite, losses))
    tell(f"{family}: loss of the last step", losses[-1], is_good=is_sound, unit=f"(of the first {losses[0]:.4g})")
    tell(f"{family}: tau, decoded on the way", taus[-1], is_good=len(taus) == 2 and min(taus) >= 1)
    apart = distance(folder)
    tell(f"{family}: a run gone on with and whole, apart", apart, is_good=apart <= APART)
    content = evaluate(evaluate_settings(folder, prompts))["content"]
    tell(f"{family}: answers decoded losslessly", content["num_decoded"], unit=f"({len(content['ties'])} ties)")


def run_settings(folder: Path, prompts: Path) -> TrainSettings:
    """Twenty steps, measured twice."""
    chosen: dict[str, Any] = {"num_steps": STEPS, "save_every": MIDDLE, "num_layers": 2, "block_size": BLOCK}
    chosen |= {"eval_every": MIDDLE, "eval_input": (str(prompts),), "eval_max_new_tokens": 2 * BLOCK}
    return small_settings(folder, folder / "whole", compute_dtype=DTYPE, **chosen)


def evaluate_settings(folder: Path, prompts: Path) -> EvaluateSettings:
    """All prompts, decoded with the whole run's last weights and with its first."""
    return EvaluateSettings(
        **{"checkpoint": str(folder / "whole"), "input": (str(prompts),), "target": str(folder / "target")},
        **{"output": (str(folder / "evaluation"),), "decode_prompts": 3, "max_new_tokens": 2 * BLOCK},  # type: ignore[arg-type]
        compute_dtype=DTYPE,
    )


def distance(folder: Path) -> float:
    """How far the two ends lie apart, as a share of how far the weights moved since the middle."""
    start, whole = (weights_of(folder / "whole", step) for step in (MIDDLE, STEPS))
    return float((weights_of(folder / "gone on", STEPS) - whole).norm() / (whole - start).norm())


def weights_of(output: Path, step: int) -> Tensor:
    """All weights of a checkpoint, one after the other."""
    tensors = load_file(output / step_folder(step) / WEIGHTS_FILE)
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])
