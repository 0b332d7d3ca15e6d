"""Where each of the target's own answers begins and ends in a rendered conversation.

The borders come from the template's structure, never from a search for text that a message could contain. An answer
begins where the prompt ends: the same template asked for the messages before it, generation prompt included, so that a
rendered prompt that is no prefix of the conversation (a template that rewrites history) marks a turn the target did
not see like this. It ends with the end-of-turn token; what the template prints after that token (ChatML's newline) is
not the target's.

    turns      texts of a conversation         answers supervised
    faithful   one, up to the last answer      those behind the very prompt the target saw
    expand     one per answer, up to it        that answer, behind the very prompt the target saw
    all        one, up to the last answer      every one, from where the template prints it
    last       one, up to the last answer      the last, behind the very prompt the target saw
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftmill.chat.borders import Borders, num_shared
from draftmill.chat.chat import Chat
from draftmill.chat.conversation import Conversation
from draftmill.contracts.rows import Message, RowError
from draftmill.settings.tokenize import Turns

Span = tuple[int, int]
"""A half-open range of characters."""
Differ = list[tuple[str, str]]
"""What two texts hold from where they first differ; ("", "") where they differ otherwise."""

# Each answer is rendered with all that precedes it, so a row costs the square of its answers: at this many 1 CPU-second
# with ChatML, 13 with Qwen3.6's template.
MAX_ANSWERS = 500

# Two answers that share neither their first nor their last letter: where both renders differ from the true one, the
# answer's own text stands.
_STAND_INS = ("b stand-in m", "k stand-in w")


class RenderedTurns(NamedTuple):
    """A rendered conversation and the ranges of its supervised answers.

    `answers[i]` is the number (from 0) of the answer that `spans[i]` belongs to; a range includes the end-of-turn
    token where the target generated one.
    """

    text: str
    answers: tuple[int, ...]
    spans: tuple[Span, ...]
    differ: tuple[tuple[str, str], ...] = ()
    """For each answer that does not count: its rendered prompt against the conversation."""


@dataclass(frozen=True)
class TurnFinder:
    """Renders conversations for one target and finds the answers in them."""

    chat: Chat
    borders: Borders

    def __call__(self, said: Conversation, turns: Turns) -> list[RenderedTurns]:
        """The texts of a conversation under a policy; RowError where the template refuses it."""
        places = said.answer_places
        if not places:
            raise RowError("no assistant turn")
        if turns != "last" and len(places) > MAX_ANSWERS:
            raise RowError(f"more than {MAX_ANSWERS} answers", f"it has {len(places):,}; cut it into several rows")
        self.chat.reading.refuse_unread(said)
        if turns == "expand":
            return self._expanded(said, places)
        # Up to the last answer: what follows teaches nothing, and makes some templates drop the reasoning before it.
        whole = said.up_to(places[-1])
        wanted = range(len(places) - 1 if turns == "last" else 0, len(places))
        text, differ = self._render(whole, len(whole.messages), asks=False), Differ()
        spans = {answer: self._asked_span(whole, text, places[answer], differ) for answer in wanted}
        if turns == "all":
            spans = {a: span or self._printed_span(whole, text, places[a]) for a, span in spans.items()}
        return [self._rendered(whole, text, {a: span for a, span in spans.items() if span}, differ)]

    def _expanded(self, said: Conversation, places: Sequence[int]) -> list[RenderedTurns]:
        found, differ = [RenderedTurns("", (), ())], Differ()
        for answer, place in enumerate(places):
            part = said.up_to(place)
            try:
                text = self._render(part, place + 1, asks=False)
            except RowError:  # as for a prompt that is refused: nobody can have asked for this answer
                continue
            if span := self._asked_span(part, text, place, differ):
                found.append(self._rendered(part, text, {answer: span}, Differ()))
        return [turns._replace(differ=tuple(differ)) for turns in found[1:] or found]

    def _rendered(self, said: Conversation, text: str, spans: dict[int, Span], differ: Differ) -> RenderedTurns:
        """Without the end of turn, and whatever follows, of an answer that was cut."""
        last = len(said.answer_places) - 1
        if said.is_cut and last in spans:
            start, stop = spans[last]
            stop -= len(self.borders.end)
            text, spans = text[:stop], {**spans, last: (start, stop)}
        return RenderedTurns(text, tuple(spans), tuple(spans.values()), tuple(differ))

    def _render(self, said: Conversation, count: int, *, asks: bool) -> str:
        """The first `count` messages."""
        return self.chat.render(
            said.messages[:count], add_generation_prompt=asks, tools=said.tools, **said.template_kwargs
        )

    def _asked_span(self, said: Conversation, text: str, place: int, differ: Differ) -> Span | None:
        """Where the answer at `place` stands in `text`, None where its rendered prompt is not what precedes it."""
        end, tail = self.borders.end, self.borders.tail
        try:
            turn = text if place + 1 == len(said.messages) else self._render(said, place + 1, asks=False)
            stop = len(turn) - len(tail)
            if not turn.endswith(end + tail):
                differ.append(("", ""))
                return None
            if not _begins(text, turn[:stop], differ):  # history is printed otherwise, whatever the prompt was
                return None
            prompt = self._render(said, place, asks=True)
        except RowError:  # nobody can have asked for this answer: it stands first, or its prompt is refused
            return None
        if len(prompt) + len(end) > stop:
            differ.append(("", ""))
            return None
        return (len(prompt), stop) if _begins(turn, prompt, differ) else None

    def _printed_span(self, said: Conversation, text: str, place: int) -> Span:
        """Where the answer at `place` stands in `text`, whatever its prompt was: what changes when the answer does."""
        changed = [said.with_answer(place, other) for other in _other_answers()]
        others = [self._render(other, len(said.messages), asks=False) for other in changed]
        start = min(num_shared(text, other) for other in others)
        stop = len(text) - min(num_shared(text[::-1], other[::-1]) for other in others)
        prompts = [prompt for prompt in (self.borders.generation_prompt, self.borders.history_prompt) if prompt]
        before, after = text[:start], text[stop:]
        if not any(map(before.endswith, prompts)) or not after.startswith(self.borders.end):
            raise RowError(
                "an answer whose borders the template does not show",
                f"between {before[-40:]!r} and {after[:40]!r} stands none of {prompts}, or not {self.borders.end!r}",
            )
        return start, stop + len(self.borders.end)


def _begins(whole: str, beginning: str, differ: Differ) -> bool:
    """Whether `whole` begins with `beginning`; notes what both hold from where they part."""
    if whole.startswith(beginning):
        return True
    same = num_shared(whole, beginning)
    differ.append((whole[same:], beginning[same:]))
    return False


def _other_answers() -> list[Message]:
    """Answers to put in an answer's place: with and without reasoning, for an empty one leaves a block of its own."""
    plain: list[Message] = [{"role": "assistant", "content": words} for words in _STAND_INS]
    return [*plain, *({**answer, "reasoning_content": answer["content"]} for answer in plain)]


def encode_turns(chat: Chat, turns: RenderedTurns) -> tuple[list[int], list[bool]]:
    """Ids of the conversation, and for each whether it lies wholly inside an answer.

    A token that straddles the border (`\\n\\n` half printed by the generation prompt) is not supervised.
    """
    encoding = chat.encode_with_offsets(turns.text)
    loss_mask = [False] * len(encoding.ids)
    spans = iter(turns.spans)
    span = next(spans, None)
    for i, (start, stop) in enumerate(encoding.offsets):
        while span is not None and start >= span[1]:
            span = next(spans, None)
        if span is None:
            break
        loss_mask[i] = span[0] <= start and stop <= span[1]
    return encoding.ids, loss_mask
