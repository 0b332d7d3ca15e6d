"""Documents packed through the target: several in one row without padding, where the target keeps them apart.

Positions restart at every document, which tells transformers' attention, masked or variable-length, where one ends. Not
every layer listens: the state and the convolution of linear attention run on from one document into the next, and so
the second one's features are wrong (NVIDIA-NeMo/Automodel#2131). Whether a target does is not read off its class but
measured, before anything is learnt.
"""

import logging
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftmill.extract.taps import Extractor, States, TapReader

log = logging.getLogger(__name__)

# Two documents, the second as long as a convolution and some state would need to show.
_PROBE_LENGTHS = (9, 14)
# Of a channel's size. Another order of summation moves float32 features by 1e-6 of it; a leak by a tenth and more.
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class PackedReader:
    """An extractor that lays the documents of a batch end to end in one row of the target."""

    reader: TapReader

    def read_states(self, input_ids_RT: Int[Tensor, "R T"], lengths_R: Int[Tensor, "R"]) -> States:
        """The states of right-padded rows, as an extractor gives them; the padding is never read."""
        is_token_RT = torch.arange(input_ids_RT.shape[1], device=lengths_R.device) < lengths_R[:, None]
        positions_RT = torch.arange(input_ids_RT.shape[1], device=input_ids_RT.device).expand_as(input_ids_RT)
        packed = self.reader.read_row(input_ids_RT[is_token_RT][None], positions_RT[is_token_RT][None])
        return States(
            _unpacked(packed.features_RTF[0], is_token_RT),
            None if packed.last_RTH is None else _unpacked(packed.last_RTH[0], is_token_RT),
        )


def _unpacked(packed_tH: Tensor, is_token_RT: Tensor) -> Tensor:
    rows = packed_tH.new_zeros(*is_token_RT.shape, packed_tH.shape[-1])
    rows[is_token_RT.to(packed_tH.device)] = packed_tH
    return rows


def can_pack(reader: TapReader) -> bool:
    """Whether the target reads two packed documents as it reads each alone; measured, in two small passes."""
    target = reader.target
    generator = torch.Generator().manual_seed(0)
    lengths_R = torch.tensor(_PROBE_LENGTHS, device=target.device)
    ids_RT = torch.randint(target.vocab_size, (2, max(_PROBE_LENGTHS)), generator=generator).to(target.device)
    alone, packed = reader.read_states(ids_RT, lengths_R), PackedReader(reader).read_states(ids_RT, lengths_R)
    return _difference(packed.features_RTF, alone.features_RTF) <= MAX_DIFFERENCE[alone.features_RTF.dtype]


def _difference(found_RTF: Float[Tensor, "R T KH"], wanted_RTF: Float[Tensor, "R T KH"]) -> float:
    """The largest difference of every channel in units of that channel, averaged: a few channels are huge and would
    hide the rest."""
    apart_F, size_F = (t.float().abs().amax(dim=(0, 1)) for t in (found_RTF - wanted_RTF, wanted_RTF))
    return float((apart_F / size_F.clamp(min=1e-30)).mean())


def extractor_of(reader: TapReader, target_packing: str) -> Extractor:
    """What features are read through: packed rows where they are asked for and proven equal; the choice is logged."""
    if target_packing == "off":
        return reader
    is_equal = can_pack(reader)
    log.info(
        "packing documents through %s: %s", type(reader.target.model).__name__, "yes" if is_equal else "no, they leak"
    )
    return PackedReader(reader) if is_equal else reader
