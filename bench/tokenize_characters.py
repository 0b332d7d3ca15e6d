"""Which characters gigatoken and tokenizers read differently: what draftmill/tokenize/characters.py lists.

Every character that may be assigned, alone, doubled, and before and after letters, digits, marks and line ends, with
Qwen3.6's tokenizer or that of a folder. About half a CPU-minute. `python bench/tokenize_characters.py [FOLDER]`
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import gigatoken
import numpy as np
from tokenizers import Tokenizer

from draftmill.tokenize.characters import DIFFERING

sys.path.append(str(Path(__file__).parents[1] / "tests"))

SURROGATES = range(0xD800, 0xE000)
# Beyond the third plane lie variation selectors and private use: a few of the latter stand for all.
POINTS = (range(0x33480), range(0xE0000, 0xE0200), range(0xF0000, 0x110000, 997))
TEXTS_AT_ONCE = 4_000


def in_contexts(character: str) -> str:
    c = character
    marks = f"e{c}\u0301 e\u0301{c} e\u0327{c}\u0301 {c}\u0323 \u1100{c}\u1161"
    return f"a{c}b {c}1 {c}\n{c}\n {c}{c}'s .{c} {marks}"


def differing(file: Path) -> Iterator[int]:
    reference, fast = Tokenizer.from_file(str(file)), gigatoken.Tokenizer(str(file)).backend
    points = [point for points in POINTS for point in points if point not in SURROGATES]
    for start in range(0, len(points), TEXTS_AT_ONCE):
        some = points[start : start + TEXTS_AT_ONCE]
        texts = [in_contexts(chr(point)) for point in some]
        wanted = reference.encode_batch_fast(texts, add_special_tokens=False)
        layout = fast.encode_batch(texts, parallel=False).layout
        ids, ends = np.asarray(layout.content.data), np.asarray(layout.offsets)
        for number, point in enumerate(some):
            if ids[ends[number] : ends[number + 1]].tolist() != wanted[number].ids:
                yield point


def spelled(points: list[int]) -> str:
    """Hexadecimal ranges, as the list has them."""
    runs: list[list[int]] = []
    for point in points:
        if runs and runs[-1][1] == point - 1:
            runs[-1][1] = point
        else:
            runs.append([point, point])
    return " ".join(f"{a:04X}" if a == b else f"{a:04X}-{b:04X}" for a, b in runs)


def main(folder: Path) -> None:
    points = list(differing(folder / "tokenizer.json"))
    listed = [given.partition("-") for given in DIFFERING.split()]
    known = {p for first, _, last in listed for p in range(int(first, 16), int(last or first, 16) + 1)}
    new = [point for point in points if point not in known]
    print(f"gigatoken {version('gigatoken')} and tokenizers {version('tokenizers')}: {len(points)} characters differ")
    print(spelled(points))
    print(f"not in the list: {spelled(new) or 'none'}")
    print(json.dumps({"bench": "tokenize_characters", "differing": len(points), "not_listed": len(new)}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        from qwen_folder import write_qwen_tokenizer

        with tempfile.TemporaryDirectory() as place:
            main(write_qwen_tokenizer(Path(place)))
