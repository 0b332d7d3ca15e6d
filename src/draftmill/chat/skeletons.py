"""Conversations rendered by filling a kept skeleton instead of running the template again.

What a template prints around the texts of a conversation depends on its shape: the roles, which texts there are, the
white space at their ends, the template's keywords. So a shape is rendered with stand-ins for its texts, long ones with
every kind of character and then plain words; where both leave the same literals around the stand-ins, these are the
skeleton, and the conversation at hand filled into it must equal its plain render.

Always rendered plainly: tools and tool calls; a text with a word that the template looks for (reading.py); a text that
begins like what the template prints in that place elsewhere, for then one more answer might count as asked for.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from draftmill.chat.conversation import Conversation
from draftmill.chat.turns import RenderedTurns, TurnFinder
from draftmill.contracts.rows import RowError
from draftmill.settings.tokenize import Turns

# Usual sets have a few dozen; beyond it (long chats with white space in all places) rows are rendered plainly.
MAX_SHAPES = 10_000

_TEXT_KEYS = ("content", "reasoning_content")
_SKELETON_KEYS = {"role", *_TEXT_KEYS}
_EVERY_KIND = "\n\t \"double\" 'single' \\back & <b> [x] (y) `code` \r\n\n UPPER lower 0123456789 é ß 漢字 🍏\n" * 60
# Formatted with a character of their own, so that no two begin alike, and with their number.
_STAND_INS = ("{0} stand-in" + _EVERY_KIND + "for text {1:05}", "{0} plain words for text {1:05}")
_FIRST_CHARACTER = 0x4E00

Shape = tuple[object, ...]


class Skeleton(NamedTuple):
    """One rendered text with its messages' texts taken out."""

    literals: tuple[str, ...]
    slots: tuple[int, ...]
    """`slots[i]` is the number of the text that stands between `literals[i]` and `literals[i + 1]`."""
    answers: tuple[int, ...]
    borders: tuple[tuple[int, int], ...]
    """Two for each answer: how many slots lie before, and how many characters of literals."""
    unlike: tuple[tuple[int, str], ...]
    """(slot's text, character): a text that begins so cannot be filled in."""

    def filled(self, texts: Sequence[str]) -> RenderedTurns | None:
        """The conversation with `texts`, None where they need a plain render."""
        for number, character in self.unlike:
            if texts[number].startswith(character):
                return None
        filling = [texts[number] for number in self.slots]
        pairs = zip(filling, self.literals[1:], strict=True)
        parts = [self.literals[0], *itertools.chain.from_iterable(pairs)]
        reached = [0, *itertools.accumulate(map(len, filling))]
        places = [reached[slots] + characters for slots, characters in self.borders]
        return RenderedTurns("".join(parts), self.answers, tuple(zip(places[::2], places[1::2], strict=True)))


class Skeletons:
    """Renders what its finder renders, only faster."""

    def __init__(self, finder: TurnFinder) -> None:
        self.chat = finder.chat
        self.plain = finder
        """Renders by the template alone."""
        self._words = finder.chat.reading.words
        self._seen: set[Shape] = set()
        self._kept: dict[Shape, tuple[Skeleton, ...]] = {}
        self.num_filled = 0
        """Conversations that needed no plain render."""

    def __call__(self, said: Conversation, turns: Turns) -> list[RenderedTurns]:
        """The texts of a conversation; RowError where the template refuses it."""
        shape, texts = self._shape(said, turns)
        if shape in self._kept:
            filled = [skeleton.filled(texts) for skeleton in self._kept[shape]]
            found = [render for render in filled if render is not None]
            if not found or len(found) < len(filled):
                return self.plain(said, turns)
            self.num_filled += 1
            return found
        made = self.plain(said, turns)
        if shape is not None and len(self._seen) < MAX_SHAPES:
            if shape in self._seen:  # shapes that come once are not worth a skeleton
                self._kept[shape] = self._proven(said, turns, texts)
            self._seen.add(shape)
        return made

    def _shape(self, said: Conversation, turns: Turns) -> tuple[Shape | None, list[str]]:
        """What a render depends on beside the texts themselves, and these, without white space at their ends."""
        if said.tools:
            return None, []
        keywords = msgspec.json.encode(said.template_kwargs, order="sorted") if said.template_kwargs else b""
        shape: list[object] = [turns, said.is_cut, keywords]
        texts: list[str] = []
        for message in said.messages:
            if len(message) > 2 and any(message[key] is not None for key in message.keys() - _SKELETON_KEYS):
                return None, []
            shape.append(message["role"])
            for key in _TEXT_KEYS:
                text = message.get(key)
                core = text.strip() if text else ""
                shape.append(_edges(text, core))
                if core:
                    for word in self._words:
                        if word in core:
                            return None, []
                    texts.append(core)
        return tuple(shape), texts

    def _proven(self, said: Conversation, turns: Turns, texts: list[str]) -> tuple[Skeleton, ...]:
        """The skeletons of a conversation's shape; none where stand-ins or the conversation itself come out other."""
        try:
            rich, words = (self._taken_apart(said, turns, _stand_ins(form, len(texts))) for form in _STAND_INS)
        except RowError:
            return ()
        if None in rich or rich != words:
            return ()
        kept = tuple(skeleton for skeleton in rich if skeleton is not None)
        filled, plain = [skeleton.filled(texts) for skeleton in kept], self.plain(said, turns)
        is_equal = all(f is None or f[:3] == p[:3] for f, p in zip(filled, plain, strict=True))
        return kept if is_equal else ()

    def _taken_apart(self, said: Conversation, turns: Turns, texts: list[str]) -> list[Skeleton | None]:
        """The skeletons that stand-ins leave; None where one of them cannot be told from its surroundings."""
        return [_skeleton(render, texts) for render in self.plain(_with_texts(said, texts), turns)]


def _stand_ins(form: str, count: int) -> list[str]:
    return [form.format(chr(_FIRST_CHARACTER + number), number) for number in range(count)]


def _edges(text: str | None, core: str) -> object:
    """How a text without its core tells itself from another: None, all of a blank text, or the white space around."""
    if text is None or not core:
        return text
    if len(core) == len(text):
        return True
    start = len(text) - len(text.lstrip())
    return text[:start], text[start + len(core) :]


def _with_texts(said: Conversation, texts: Sequence[str]) -> Conversation:
    """The conversation with other texts, the white space around them as it was."""
    left = iter(texts)

    def other(text: str | None) -> str | None:
        core = text.strip() if text else ""
        return text.replace(core, next(left), 1) if text and core else text

    messages = [{**m, **{key: other(m[key]) for key in _TEXT_KEYS if key in m}} for m in said.messages]
    return said._replace(messages=messages)


def _skeleton(turns: RenderedTurns, texts: list[str]) -> Skeleton | None:
    found = sorted((place, number) for number, text in enumerate(texts) for place in _places(turns.text, text))
    cuts = [0, *(cut for place, number in found for cut in (place, place + len(texts[number]))), len(turns.text)]
    parts = [turns.text[start:stop] for start, stop in itertools.pairwise(cuts)]
    borders = [_border(place, parts) for span in turns.spans for place in span]
    unlike = _unlike(turns, texts)
    if unlike is None or None in borders:
        return None
    slots = tuple(number for _, number in found)
    return Skeleton(tuple(parts[::2]), slots, turns.answers, tuple(b for b in borders if b), unlike)


def _places(whole: str, text: str) -> Iterator[int]:
    place = whole.find(text)
    while place >= 0:
        yield place
        place = whole.find(text, place + len(text))


def _border(place: int, parts: Sequence[str]) -> tuple[int, int] | None:
    """A place in the joined parts as (slots before it, characters of literals before it); None inside a text."""
    literal_chars = 0
    for number, part in enumerate(parts):
        if number % 2 == 0:
            if place <= len(part):
                return number // 2, literal_chars + place
            literal_chars += len(part)
        elif place < len(part):
            return None
        place -= len(part)
    return None


def _unlike(turns: RenderedTurns, texts: list[str]) -> tuple[tuple[int, str], ...] | None:
    """Which texts must not begin with which character, lest an answer count that did not; None: not to be told."""
    found: set[tuple[int, str]] = set()
    for one, other in turns.differ:
        first, second = _text_at(one, texts), _text_at(other, texts)
        if (first is None) == (second is None):
            if first is not None or not one or not other:
                return None
        elif first is not None:
            found.add((first, other[:1]))
        elif second is not None:
            found.add((second, one[:1]))
    return tuple(sorted(found))


def _text_at(rest: str, texts: Sequence[str]) -> int | None:
    return next((number for number, text in enumerate(texts) if rest.startswith(text)), None)
