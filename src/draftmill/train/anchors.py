"""Draws that depend on their key alone: the order of samples in an epoch, and the anchors of one visit to one sample.

A key is (what, seed, epoch, ...), hashed by blake2b into the state of a PCG64 generator whose raw stream never changes
between versions. So a draw does not depend on batch composition, on the number of workers, or on what came before.
"""

import hashlib

import numpy as np

from draftmill.train.samples import BoolArray, IntArray


def keyed_number(num_bytes: int, *key: str | int) -> int:
    """A number of so many bytes that belongs to `key`."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big")


def permutation(length: int, *key: str | int) -> IntArray:
    """The numbers 0 .. length - 1 in the order that belongs to `key`."""
    bits = np.random.PCG64(keyed_number(16, *key)).random_raw(length)
    return np.argsort(bits, kind="stable")


def anchor_positions(loss_mask: BoolArray) -> IntArray:
    """Positions of one sample that can be an anchor: supervised, and followed by a supervised token."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def anchor_counts(num_eligible: IntArray, lengths: IntArray, num_anchors: int, max_tokens: int) -> IntArray:
    """Anchors of each sample: its length's share of `num_anchors`, rounded up, as far as it has positions."""
    return np.minimum(num_eligible, -(-num_anchors * lengths // max_tokens))


def draw_anchors(loss_mask: BoolArray, count: int, *, seed: int, epoch: int, sample_id: str, draw: int) -> IntArray:
    """`count` distinct anchor positions of one sample, ascending; fresh for every epoch and draw."""
    eligible = anchor_positions(loss_mask)
    return np.sort(eligible[permutation(len(eligible), "anchors", seed, epoch, sample_id, draw)[:count]])
