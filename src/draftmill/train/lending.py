"""What ranks give each other beside states, as a drafter rank is lent the ends of the target: a structure without its
tensors, and their numbers.

Pickled whole, a table of 248,320 x 5,120 numbers lies in memory several times over at both ends. Here tensors are left
out of the pickle and cross after it, in the same order, from where they lie to where they stay, a piece at a time. One
that is held twice, as by a head that is the embedding, crosses once and stays one.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PIECE_BYTES = 1 << 26


def taken_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """What is left of a value without its tensors, and these, each once."""
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(value)
    return structure.getvalue(), pickler.tensors


def put_together(structure: bytes) -> tuple[Any, list[Tensor]]:
    """The value again, and its tensors in the same order, on the CPU, for their numbers to be written into."""
    unpickler = _Unpickler(io.BytesIO(structure))
    return unpickler.load(), unpickler.tensors


def pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The memory of tensors, one after the other, in flat views of `_PIECE_BYTES` at most."""
    for tensor in tensors:
        yield from tensor.detach().flatten().split(_PIECE_BYTES // tensor.itemsize)


class _Pickler(pickle.Pickler):
    """Says of a tensor which one it is and what it looks like."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number, tuple(obj.shape), obj.dtype, isinstance(obj, nn.Parameter), obj.requires_grad


class _Unpickler(pickle.Unpickler):
    """Makes room for a tensor where it is first spoken of."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: Any) -> Tensor:
        number, shape, dtype, is_parameter, requires_grad = pid
        if number == len(self.tensors):
            room = torch.empty(shape, dtype=dtype)
            self.tensors.append(nn.Parameter(room, requires_grad) if is_parameter else room)
        return self.tensors[number]
