"""Promises: PyPI dflash 0.1.0 loads the exported folder and decodes the same tokens in the same cycles as we do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from torch import nn

from draftmill.export.run import run
from draftmill.extract.target import Target, load_target
from draftmill.model.checkpoint import load_drafter, save_drafter
from draftmill.model.drafter import Drafter
from draftmill.settings.export import ExportSettings
from draftmill.speculation.decode import Limits, Pair, decode_plainly, decode_speculatively
from tiny import write_tiny_target
from tiny_drafter import overfit_drafter, tiny_shape

# dflash 0.1.0 was written for transformers 5.15, which had another name for the cache.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")]

PROMPT = [257, *range(40, 51)]
OTHERS = [[256, 10, 20, 30], list(range(5, 60))]
NEW_TOKENS = 22


def exported(folder: Path, drafter: Drafter) -> Path:
    save_drafter(folder / "checkpoint", drafter)
    run(ExportSettings(checkpoint=str(folder / "checkpoint"), output=str(folder / "export"), dtype="float32"))
    return folder / "export"


def by_dflash(folder: Path, target: Target, prompt: list[int], stop_ids: list[int]) -> tuple[list[int], list[int]]:
    """The answer and the tokens per cycle of PyPI dflash, cut at `NEW_TOKENS` as ours is.

    Its own statistics need CUDA, so the cycles are told by the positions at which it asks the target to verify.
    """
    model, report = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    starts: list[int] = []

    def note(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        starts.append(int(kwargs["position_ids"][0, 0]))

    hook = target.model.register_forward_pre_hook(note, with_kwargs=True)
    # It shortens blocks where its limit comes near, and a shorter block drafts other tokens: the limit is kept away.
    limit = NEW_TOKENS + model.block_size
    ids = dflash_generate(model.eval(), target.model, torch.tensor([prompt]), limit, stop_ids or None)
    hook.remove()
    answer = ids[0, len(prompt) :].tolist()
    ends = [start - len(prompt) for start in starts[2:]] + [len(answer) - 1]
    cycles = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return answer[:NEW_TOKENS], cut(cycles, min(NEW_TOKENS, len(answer)) - 1)


def cut(cycles: Sequence[int], total: int) -> list[int]:
    """The first cycles, the last one shortened so that they emit `total` tokens."""
    kept = []
    for emitted in cycles:
        kept.append(min(emitted, total - sum(kept)))
        if sum(kept) == total:
            break
    return kept


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request, tmp_path_factory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target"), family=request.param))


@pytest.mark.parametrize("window", [None, 5])
def test_dflash_decodes_the_same_tokens_in_the_same_cycles(target, window, tmp_path):
    answer = decode_plainly(target, PROMPT, Limits(frozenset(), NEW_TOKENS, 64)).token_ids
    # Trained a little: some drafts are right and some are not.
    drafter = overfit_drafter(target, tiny_shape(target, window=window), PROMPT, answer, num_steps=8 if window else 12)
    folder = exported(tmp_path, drafter)
    pair = Pair.of(target, load_drafter(folder))
    seen = set()
    for prompt in (PROMPT, *OTHERS):
        plain = decode_plainly(target, prompt, Limits(frozenset(), NEW_TOKENS, 64)).token_ids
        for stop_ids in ([], [plain[9]]):
            ours = decode_speculatively(pair, prompt, Limits(frozenset(stop_ids), NEW_TOKENS, 64))
            assert (list(ours.token_ids), list(ours.emitted)) == by_dflash(folder, target, prompt, stop_ids)
            seen |= set(ours.emitted)
    assert len(seen) > 2, "the case must hold short and long cycles"
