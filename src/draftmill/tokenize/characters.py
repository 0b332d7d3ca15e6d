"""Which characters a fast engine may be given: it follows other Unicode tables than the reference for a few hundred.

Found by comparing gigatoken 0.10.0 with tokenizers 0.23.3 on every assigned character, alone, doubled, and before and
after letters, digits, marks and line ends (`bench/tokenize_characters.py` does it again): young scripts and marks, of
which one engine does not know yet that they are letters, or that they combine.
"""

import functools
import itertools
import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

# Inclusive, hexadecimal.
DIFFERING = (
    "07FD 088F 0897-089F 08CA-08D3 09FE 0C3C 0C5C 0CDC 0D3B-0D3C 0EBA 1715 1ABF-1ADD 1AE0-1AEB 1DF6-1DFA "
    "A7CE-A7CF A7D2 A7D4 A7F1 A82C 10940-10959 10D24-10D27 10D69-10D6D 10EAB-10EAC 10EC5-10EC7 10EFA-10EFB "
    "10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 113C2 113CE-113D0 1145E 11839-1183A 1193D-1193E 11943 119E0 "
    "11A34 11A47 11A99 11B60-11B67 11D42 11D44-11D45 11D97 11DB0-11DDB 11DE0-11DE9 11F41-11F42 1611E 1612F 16D67 "
    "16EA0-16EB8 16EBB-16ED3 16FF0-16FF6 187F8-187FF 18D09-18D1E 18D80-18DF2 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF "
    "1E4EC-1E4EF 1E5EE-1E5EF 1E6C0-1E6DE 1E6E0-1E6F5 1E6FE-1E6FF 2B73A-2B73F 2CEA2-2CEAD 323B0-33479"
)
PLAIN, MARK, JOINS, UNTRUSTED = range(4)
"""A mark has a place in the order of marks; what joins makes one character with what stands before it."""
_NUM_CHARACTERS = 0x110000
# Where this Python may know characters; of the planes above, only those for private use hold any.
_TABLED = (range(0x33480), range(0xE0000, 0xE1000))
_PRIVATE_USE = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
# Hangul vowels and finals, which join what stands before them by rule, not by table.
_HANGUL = (range(0x1161, 0x1176), range(0x11A8, 0x11C3))
_MAX_WORDS = 100_000


class Characters:
    """Tells texts that hold only trusted characters, in composed form (NFC)."""

    def __init__(self) -> None:
        self._kinds = _kinds()
        self._composed: set[str] = set()
        """Words that were seen to be in composed form: a shortcut, without influence on what is told."""

    def are_trusted(self, text: str) -> bool:
        """Whether both engines read the text alike, and normalizing it changes nothing."""
        if text.isascii():
            return True
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        kind = int(self._kinds.take(points).max())
        if kind == JOINS:
            return self._is_composed(text)
        return kind == PLAIN or (kind == MARK and unicodedata.is_normalized("NFC", text))

    def _is_composed(self, text: str) -> bool:
        """Word by word, for characters that may join are slow to check; nothing joins white space."""
        words = set(text.split()) - self._composed
        if not unicodedata.is_normalized("NFC", " ".join(words)):
            return False
        if len(self._composed) > _MAX_WORDS:
            self._composed.clear()
        self._composed |= words
        return True


@functools.cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of every character; those that this Python has no tables for are not trusted either."""
    kinds = np.full(_NUM_CHARACTERS, UNTRUSTED, np.uint8)
    for points in _TABLED:
        characters = list(map(chr, points))
        is_mark = np.fromiter(map(unicodedata.combining, characters), np.bool_)
        is_known = np.array(list(map(unicodedata.category, characters))) != "Cn"
        is_composed = np.fromiter(map(functools.partial(unicodedata.is_normalized, "NFC"), characters), np.bool_)
        kinds[points.start : points.stop] = np.where(is_known & is_composed, np.where(is_mark, MARK, PLAIN), UNTRUSTED)
    for start, stop in _PRIVATE_USE:
        kinds[start:stop] = PLAIN
    for point in itertools.chain(_second_halves(), *_HANGUL):
        kinds[point] = max(kinds[point], JOINS)
    for given in DIFFERING.split():
        first, _, last = given.partition("-")
        kinds[int(first, 16) : int(last or first, 16) + 1] = UNTRUSTED
    return kinds


def _second_halves() -> Iterator[int]:
    """What joins a first half to one character."""
    for parts in map(str.split, map(unicodedata.decomposition, map(chr, _TABLED[0]))):
        if len(parts) == 2 and not parts[0].startswith("<"):
            yield int(parts[1], 16)
