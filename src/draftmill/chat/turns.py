"""Where each of the target's own answers begins and ends in a rendered conversation.

The borders come from the template's structure, never from a search for text that a message could contain. An answer
begins where the prompt ends: the same template asked for the messages before it, generation prompt included, so that a
rendered prompt that is no prefix of the conversation (a template that rewrites history) marks a turn the target did
not see like this. It ends with the end-of-turn token, which is found once, at start-up, by probing with sentinels;
what the template prints after that token (ChatML's newline) is not the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.chat.chat import Chat
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import Message, RowError

# Lower-case words and digits: a template that changes case or strips punctuation shows itself.
_QUESTION, _REASONING, _ANSWER = "probe question 7041", "probe reasoning 5283", "probe answer 9167"


@dataclass(frozen=True)
class Borders:
    """What a template prints around an answer that comes last."""

    generation_prompt: str
    """From the end of the prompt's messages to where the target starts, e.g. `<|im_start|>assistant\\n`."""
    end: str
    """The end-of-turn token, the target's own last token, e.g. `<|im_end|>`."""
    tail: str
    """What the template prints after it, e.g. a newline."""


@dataclass(frozen=True)
class RenderedTurns:
    """A rendered conversation and, for each answer whose prompt is what the target saw, its half-open character range.

    `answers[i]` is the number (from 0) of the assistant message that `spans[i]` belongs to; a range includes the
    end-of-turn token.
    """

    text: str
    answers: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def find_borders(chat: Chat, **template_kwargs: Any) -> Borders:
    """Probes the template; InputError with what was tried where its borders cannot be found."""
    question = [{"role": "user", "content": _QUESTION}]
    tried: list[str] = []
    for answer in ({"content": _ANSWER}, {"content": _ANSWER, "reasoning_content": _REASONING}):
        try:
            bare = chat.render(question, add_generation_prompt=False, **template_kwargs)
            prompt = chat.render(question, add_generation_prompt=True, **template_kwargs)
            whole = chat.render(
                [*question, {"role": "assistant", **answer}], add_generation_prompt=False, **template_kwargs
            )
            return _borders(chat, bare, prompt, whole)
        except RowError as error:
            tried.append(f"an answer with {' and '.join(answer)}: {error}")
    raise InputError(
        "the chat template does not show where an answer begins and ends, so no loss mask can be trusted. Tried with "
        f"a question and {'; then '.join(tried)}. Let the engine return its token ids (they need no template), or use "
        "a template that prints prompt, answer and end-of-turn token in that order"
    )


def _borders(chat: Chat, bare: str, prompt: str, whole: str) -> Borders:
    for name, text, words in (("prompt", prompt, _QUESTION), ("conversation", whole, _ANSWER)):
        if text.count(words) != 1:
            raise RowError(f"the rendered {name} holds its message {text.count(words)} times", repr(text))
    if not prompt.startswith(bare) or prompt == bare:
        raise RowError("add_generation_prompt appends nothing to the messages", f"{bare!r} became {prompt!r}")
    if not whole.startswith(prompt):
        raise RowError("the conversation does not begin with the prompt", f"{whole!r} against {prompt!r}")
    after = whole[whole.index(_ANSWER) + len(_ANSWER) :]
    return Borders(prompt[len(bare) :], *_end_of_turn(chat, after))


def _end_of_turn(chat: Chat, after: str) -> tuple[str, str]:
    """`after`, what follows an answer, as (end-of-turn token, the rest)."""
    special = {i for i, token in chat.tokenizer.get_added_tokens_decoder().items() if token.special}
    encoding = chat.encode_with_offsets(after)
    if not encoding.ids or encoding.ids[0] not in chat.stop_ids | special:
        raise RowError("no end-of-turn token directly after the answer", f"{after!r} follows it")
    end = encoding.offsets[0][1]
    return after[:end], after[end:]


def render_turns(
    chat: Chat,
    borders: Borders,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> RenderedTurns:
    """The conversation as one text with the ranges of its answers; RowError where the template refuses it."""

    def render(count: int, *, asks: bool) -> str:
        return chat.render(messages[:count], add_generation_prompt=asks, tools=tools, **template_kwargs)

    text = render(len(messages), asks=False)
    found: list[tuple[int, tuple[int, int]]] = []
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for answer, place in enumerate(places):
        try:
            prompt = render(place, asks=True)
            turn = text if place + 1 == len(messages) else render(place + 1, asks=False)
        except RowError:  # nobody can have asked for this answer: it stands first, or its prompt is refused
            continue
        stop = len(turn) - len(borders.tail)
        ends_whole = turn.endswith(borders.end + borders.tail) and len(prompt) + len(borders.end) <= stop
        if ends_whole and turn.startswith(prompt) and text.startswith(turn[:stop]):
            found.append((answer, (len(prompt), stop)))
    return RenderedTurns(text, tuple(answer for answer, _ in found), tuple(span for _, span in found))


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
