"""Promise: the block rule says what dflash.md section 3 and 4 say, on cases worked out by hand."""

from draftmill.contracts.blocks import (
    PADDING_ANCHOR,
    anchor_positions,
    num_supervised_slots,
    slot_sees_context,
    slot_sees_slot,
)

TWO_DOCUMENTS = [0] * 10 + [1] * 7


def test_a_block_sees_the_context_strictly_before_its_anchor() -> None:
    seen = [key for key in range(10) if slot_sees_context(4, 2, key, [0] * 10)]
    assert seen == [0, 1, 2, 3]


def test_a_block_never_sees_another_document() -> None:
    seen = [key for key in range(17) if slot_sees_context(12, 0, key, TWO_DOCUMENTS)]
    assert seen == [10, 11]


def test_a_window_is_measured_from_the_slot_itself() -> None:
    # Slot 2 of the block at 8 stands at position 10; a window of 4 reaches back to position 7.
    assert [key for key in range(8) if slot_sees_context(8, 2, key, [0] * 12, window=4)] == [7]


def test_a_padding_block_sees_no_context_and_all_of_itself() -> None:
    assert not any(slot_sees_context(PADDING_ANCHOR, 0, key, [0] * 5) for key in range(5))
    assert slot_sees_slot(3, 0, 3, 2)


def test_full_layers_look_both_ways_inside_a_block_and_sliding_layers_back() -> None:
    assert slot_sees_slot(1, 0, 1, 3)
    assert not slot_sees_slot(1, 0, 1, 3, window=8)
    assert slot_sees_slot(1, 3, 1, 0, window=8)
    assert not slot_sees_slot(1, 3, 1, 0, window=3)
    assert not slot_sees_slot(1, 0, 2, 0)


def test_an_anchor_needs_two_supervised_tokens_of_one_document() -> None:
    mask = [
        False,
        True,
        True,
        False,
        True,
        False,
        False,
        False,
        True,
        True,
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert anchor_positions(mask, TWO_DOCUMENTS) == [1, 8, 10, 13]


def test_slots_stop_at_the_first_unsupervised_token_and_at_the_documents_end() -> None:
    mask = [False, True, True, True, False, True, True, True, True, True] + [True] * 7
    assert num_supervised_slots(1, mask, TWO_DOCUMENTS, 8) == 2
    assert num_supervised_slots(8, mask, TWO_DOCUMENTS, 4) == 1
    assert num_supervised_slots(5, mask, TWO_DOCUMENTS, 4) == 3
    assert num_supervised_slots(16, mask, TWO_DOCUMENTS, 4) == 0
