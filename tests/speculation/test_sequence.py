"""Promises: however much of a block is kept, the target goes on as if it had never read the rest."""

import pytest
import torch

from draftmill.extract.target import Target, freeze
from draftmill.speculation.sequence import CachedTarget
from tiny_families import FAMILIES, VOCAB, tiny_model

pytestmark = pytest.mark.torch

BLOCK = 5
# Shorter than a convolution's kernel, and longer.
PROMPT_LENGTHS = (2, 11)
# Logits of about 1; a state that was not put back moves them by 0.01 at least.
ROUNDING = 1e-4


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits_after(target: Target, token_ids: list[int]) -> torch.Tensor:
    """The oracle: everything read in one pass that remembers nothing."""
    return target.model(torch.tensor([token_ids])).logits[0, -1]


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("wrapper")])
def test_every_kept_prefix_of_a_block_leads_on_as_if_nothing_else_had_been_read(family: str) -> None:
    target = freeze(tiny_model(family))
    for length in PROMPT_LENGTHS:
        with torch.no_grad():
            sequence, known = CachedTarget(target), random_ids(length, seed=length)
            sequence.read(known)
            for round_, count in enumerate([0, BLOCK, 1, 3, 0, BLOCK - 1, BLOCK]):
                block = random_ids(BLOCK, seed=100 + round_)
                proposed_BV = sequence.propose(block)
                for slot in range(BLOCK):
                    wanted_V = logits_after(target, [*known, *block[: slot + 1]])
                    torch.testing.assert_close(proposed_BV[slot], wanted_V, atol=ROUNDING, rtol=0)
                sequence.keep(count)
                known += block[:count]
            next_id = random_ids(1, seed=200)
            wanted_V = logits_after(target, known + next_id)
            torch.testing.assert_close(sequence.read(next_id)[0], wanted_V, atol=ROUNDING, rtol=0)


def test_only_recurrent_targets_read_again_what_was_kept() -> None:
    for family, num_passes in (("qwen3", 2), ("qwen3_5", 3)):
        target = freeze(tiny_model(family))
        lengths: list[int] = []
        target.embed.register_forward_hook(lambda _module, args, _output, seen=lengths: seen.append(args[0].shape[1]))
        with torch.no_grad():
            sequence = CachedTarget(target)
            sequence.read(random_ids(4, seed=0))
            sequence.propose(random_ids(BLOCK, seed=1))
            sequence.keep(2)
            sequence.propose(random_ids(BLOCK, seed=2))
            sequence.keep(BLOCK)
        assert lengths == [4, BLOCK, *[2] * (num_passes - 2), BLOCK]
