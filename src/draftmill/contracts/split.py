"""Training rows and held-out rows, told apart by a hash of the row's id and never by its position."""

import hashlib
from typing import Literal

Split = Literal["all", "train", "held-out"]

_SCALE = 2**64


def is_held_out(row_id: str, held_out_frac: float) -> bool:
    """Whether the row belongs to the held-out share; the same row falls on the same side in any file, in any order."""
    digest = hashlib.blake2b(row_id.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") / _SCALE < held_out_frac


def is_in_split(row_id: str, split: Split, held_out_frac: float) -> bool:
    """Whether the row belongs to `split`; "all" takes every row."""
    return split == "all" or is_held_out(row_id, held_out_frac) == (split == "held-out")
