"""What is lent arrives bit for bit, held once where it was held once, and no number of it is in a pickle."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from draftmill.extract.target import Ends, freeze  # noqa: E402
from draftmill.train.lending import pieces, put_together, taken_apart  # noqa: E402
from draftmill.train.roles import Loan  # noqa: E402
from tiny_drafter import random_drafter, tiny_shape  # noqa: E402
from tiny_families import tiny_model  # noqa: E402

pytestmark = pytest.mark.torch


def loan(*, is_tied: bool) -> Loan:
    target = freeze(tiny_model("llama").bfloat16())
    if is_tied:
        target.head.weight = target.embed.weight
    return Loan(Ends(target.embed, target.norm, target.head), random_drafter(tiny_shape(target)).train())


def brought_over(value: Loan) -> Loan:
    structure, lent = taken_apart(value)
    borrowed, rooms = put_together(structure)
    for there, here in zip(pieces(lent), pieces(rooms), strict=True):
        here.copy_(there)
    return borrowed


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_loan_arrives_bit_for_bit_and_what_is_one_matrix_stays_one(is_tied: bool) -> None:
    lent = loan(is_tied=is_tied)
    borrowed = brought_over(lent)
    for mine, theirs in zip(parts(borrowed), parts(lent), strict=True):
        for (name, one), (other_name, other) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert (name, one.dtype, one.requires_grad) == (other_name, other.dtype, other.requires_grad)
            assert torch.equal(one, other) and one is not other
    assert (borrowed.ends.head.weight is borrowed.ends.embed.weight) == is_tied
    assert borrowed.drafter.shape == lent.drafter.shape and borrowed.drafter.training


def parts(of: Loan) -> list[nn.Module]:
    return [of.ends.embed, of.ends.norm, of.ends.head, of.drafter]


def test_a_structure_holds_no_numbers_and_a_matrix_of_two_owners_crosses_once() -> None:
    layer = nn.Linear(1_000, 1_000)
    structure, tensors = taken_apart({"one": layer, "other": layer, "numbers": layer.weight})
    assert len(structure) < 4_000 and [tensor.numel() for tensor in tensors] == [1_000_000, 1_000]


def test_large_tensors_cross_in_pieces_that_are_views_of_them() -> None:
    large, small = torch.empty(40_000, 500), torch.zeros(())  # 80 MB that nobody writes
    found = list(pieces([large, small]))
    assert sum(piece.numel() for piece in found) == large.numel() + 1
    assert max(piece.nbytes for piece in found) == 1 << 26
    assert [piece.data_ptr() for piece in found] == [large.data_ptr(), large.data_ptr() + (1 << 26), small.data_ptr()]
