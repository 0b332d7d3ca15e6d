"""Rendered conversations -> ids and loss masks: by the reference, or by a fast engine that is proven equal to it.

Hugging Face `tokenizers` is the reference. `gigatoken` is tens of times as fast a core; it is used for a tokenizer only
after it has reproduced the reference on everything in probe.py, and never for a text with one of the few characters
where the two follow different Unicode tables (characters.py).

The fast engine tells no offsets, and none are needed: in a byte-level vocabulary each token stands for a known number
of bytes, so a running sum over a text's tokens says where each of them lies. That the sum over the whole text is its
length in bytes is checked for every text.
"""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gigatoken
import numpy as np
from gigatoken.gigatoken_rs import BPETokenizer
from numpy.typing import NDArray
from tokenizers.normalizers import NFC

from draftmill.chat.chat import Chat
from draftmill.chat.turns import RenderedTurns, encode_turns
from draftmill.tokenize.characters import Characters
from draftmill.tokenize.probe import in_context, probe_characters, probe_texts

_CONTEXTS_PER_PROBE = 16

log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """Ids of one text, and for each whether it lies wholly inside an answer."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]

    def equals(self, other: "Encoded") -> bool:
        """Whether ids and mask are the same."""
        return np.array_equal(self.input_ids, other.input_ids) and np.array_equal(self.loss_mask, other.loss_mask)


@runtime_checkable
class Encoder(Protocol):
    """Turns rendered conversations, valid Unicode each, into ids and masks."""

    def encode(self, texts: Sequence[RenderedTurns]) -> list[Encoded]:
        """One result a text, in order."""
        ...


class ReferenceEncoder:
    """Hugging Face `tokenizers`, with its own offsets."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def encode(self, texts: Sequence[RenderedTurns]) -> list[Encoded]:
        """One result a text, in order."""
        encoded = (encode_turns(self._chat, turns) for turns in texts)
        return [Encoded(np.array(ids, np.int32), np.array(mask, np.bool_)) for ids, mask in encoded]


class Unproven(Exception):
    """The fast engine cannot be used for a tokenizer; the message says why."""


class FastEncoder:
    """gigatoken, and the reference for the texts that it is not trusted with."""

    def __init__(self, chat: Chat, file: Path) -> None:
        """Unproven where the engine does not take this kind of tokenizer, or does not reproduce the reference.

        `file` is the tokenizer.json that `chat` was opened with.
        """
        if not isinstance(chat.tokenizer.normalizer, NFC | None):
            raise Unproven(f"the normalizer is {type(chat.tokenizer.normalizer).__name__}, neither NFC nor none")
        try:
            engine = gigatoken.Tokenizer.from_json(file.read_bytes()).backend
        except RuntimeError as error:
            raise Unproven(str(error).partition("\n")[0]) from error
        if not isinstance(engine, BPETokenizer):
            raise Unproven("the vocabulary is not byte-level")
        self.engine = engine
        self._bytes_of_id = _bytes_of_id(engine)
        self._reference = ReferenceEncoder(chat)
        self._characters = Characters()
        self._prove([token.content for token in chat.tokenizer.get_added_tokens_decoder().values()])

    def encode(self, texts: Sequence[RenderedTurns]) -> list[Encoded]:
        """One result a text, in order."""
        trusted = [number for number, turns in enumerate(texts) if self._characters.are_trusted(turns.text)]
        made = dict(zip(trusted, self.encode_trusted([texts[number] for number in trusted]), strict=True))
        return [made.get(number) or self._reference.encode([turns])[0] for number, turns in enumerate(texts)]

    def encode_trusted(self, texts: Sequence[RenderedTurns]) -> list[Encoded | None]:
        """By the fast engine alone; None for a text whose tokens do not add up to its bytes."""
        if not texts:
            return []
        layout: Any = self.engine.encode_batch([turns.text for turns in texts], parallel=False).layout
        ids, ends = np.asarray(layout.content.data).view(np.int32), np.asarray(layout.offsets)
        reached = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(self._bytes_of_id.take(ids), out=reached[1:])
        places = [_byte_places(turns) for turns in texts]
        bases = reached[ends].tolist()
        mask = _mask(reached, [base + place for base, own in zip(bases, places, strict=False) for place in own[:-1]])
        adds_up = [bases[i + 1] - bases[i] == own[-1] for i, own in enumerate(places)]
        cuts = ends.tolist()
        return [Encoded(ids[a:b], mask[a:b]) if ok else None for a, b, ok in zip(cuts, cuts[1:], adds_up, strict=False)]

    def _prove(self, added_tokens: Sequence[str]) -> None:
        """Unproven where ids or mask of any probe differ from the reference's."""
        alone = [context for context in map(in_context, probe_characters()) if self._characters.are_trusted(context)]
        together = ("".join(alone[i : i + _CONTEXTS_PER_PROBE]) for i in range(0, len(alone), _CONTEXTS_PER_PROBE))
        texts = [*probe_texts(added_tokens), *together]
        probes = [RenderedTurns(text, (0,), ((len(text) // 3, 2 * len(text) // 3),)) for text in texts]
        both = zip(texts, self.encode(probes), self._reference.encode(probes), strict=True)
        differing = [text for text, fast, true in both if not fast.equals(true)]
        if differing:
            raise Unproven(f"it differs from tokenizers on {len(differing)} of {len(texts)} probes, {differing[0]!r}")


def _bytes_of_id(engine: BPETokenizer) -> NDArray[np.int16]:
    """How many bytes each id stands for."""
    lengths = np.zeros(engine.vocab_size, np.int16)
    vocab = engine.vocab
    lengths[list(vocab)] = list(map(len, vocab.values()))
    return lengths


def _byte_places(turns: RenderedTurns) -> list[int]:
    """The borders of a text's answers, and its length, in bytes."""
    text, borders = turns.text, [place for span in turns.spans for place in span]
    if text.isascii():
        return [*borders, len(text)]
    pieces = itertools.pairwise([0, *borders, len(text)])
    return list(itertools.accumulate(len(text[start:stop].encode()) for start, stop in pieces))


def _mask(reached: NDArray[np.int64], borders: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens lie wholly between two borders; `reached[i]` bytes lie before token i, and borders come in pairs."""
    mask = np.zeros(len(reached) - 1, np.bool_)
    at = np.minimum(np.searchsorted(reached, borders), len(mask))
    # A border inside a token: an answer that begins there leaves it out, and so does one that ends there.
    ends_inside = reached[at[1::2]] != np.asarray(borders, np.int64)[1::2]
    for start, stop in zip(at[::2].tolist(), (at[1::2] - ends_inside).tolist(), strict=True):
        mask[start:stop] = True
    return mask


def open_encoder(chat: Chat, file: Path) -> Encoder:
    """The fast engine where it is proven for the tokenizer in `file`, else the reference."""
    try:
        return FastEncoder(chat, file)
    except Unproven as reason:
        log.warning("tokenizing with the slow reference (the same ids): gigatoken cannot be used here: %s", reason)
        return ReferenceEncoder(chat)
