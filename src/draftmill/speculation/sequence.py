"""One sequence on its way through the target, which can be put back to any prefix of what it was given last.

Keys, values and inputs of convolutions are cropped. A layer with recurrent state (the linear attention of Qwen3.5 and
3.6) folds every token it reads into one state, which no crop takes back: that state is copied before a pass of which
less may be kept, put back after it, and what was kept is read once more. Engines keep a state for every slot of a block
instead, and need no second reading; the tokens are the same.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from draftmill.extract.target import Target


class CachedTarget:
    """The target with what it remembers of the tokens that were kept."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.config)
        # Sliding layers and convolutions keep what lies behind their window until they are told what stays.
        self._cache.activate_past_recording()
        self._recurrent = [layer for layer in self._cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._proposed: Sequence[int] = ()
        self._before: list[dict[int, Tensor]] = []

    def read(self, token_ids: Sequence[int]) -> Float[Tensor, "1 V"]:
        """Reads further tokens, all of which are kept; the logits after the last of them."""
        logits_1V = self._forward(token_ids, 1)
        self._cache.crop(0)
        return logits_1V

    def propose(self, token_ids: Sequence[int]) -> Float[Tensor, "B V"]:
        """Reads further tokens, of which `keep` is told next how many stay; the logits after each of them."""
        self._proposed = token_ids
        self._before = [_copied(layer.recurrent_states) for layer in self._recurrent]
        return self._forward(token_ids, len(token_ids))

    def keep(self, count: int) -> None:
        """Forgets all but the first `count` of the tokens proposed last."""
        num_refused = len(self._proposed) - count
        if not num_refused or not self._recurrent:
            self._cache.crop(-num_refused)
            return
        self._cache.crop(-len(self._proposed))
        for layer, states in zip(self._recurrent, self._before, strict=True):
            layer.recurrent_states.update(states)
        if count:
            self.read(self._proposed[:count])

    def _forward(self, token_ids: Sequence[int], num_logits: int) -> Float[Tensor, "Q V"]:
        ids_1T = torch.tensor([token_ids], device=self._target.device)
        # Positional, because transformers 5.24 renamed past_key_values to cache: (ids, mask, positions, cache).
        output = self._target.model(ids_1T, None, None, self._cache, use_cache=True, logits_to_keep=num_logits)
        return output.logits[0]


def _copied(states: dict[int, Tensor | None]) -> dict[int, Tensor]:
    """Copies, because layers write their next state into the memory of the one before."""
    return {index: state.clone() for index, state in states.items() if state is not None}
