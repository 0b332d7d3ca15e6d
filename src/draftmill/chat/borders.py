"""What a template prints around an answer, found once by probing it with sentinels; no template is guessed at.

… last message of the prompt | generation prompt | the answer | end of turn | tail
                                supervised:        ^^^^^^^^^^^^^^^^^^^^^^^^
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftmill.chat.chat import Chat
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import RowError

# Lower-case words and digits: a template that changes case or strips punctuation shows itself.
_QUESTION, _REASONING, _ANSWER = "probe question 7041", "probe reasoning 5283", "probe answer 9167"


@dataclass(frozen=True)
class Borders:
    """What a template prints around an answer."""

    generation_prompt: str
    """From the end of the prompt's messages to where the target starts, e.g. `<|im_start|>assistant\\n<think>\\n`."""
    history_prompt: str | None
    """The same for an answer that later messages follow, e.g. `<|im_start|>assistant\\n`; None: not to be told."""
    end: str
    """The end-of-turn token, the target's own last token, e.g. `<|im_end|>`."""
    tail: str
    """What the template prints after it, e.g. a newline."""


def find_borders(chat: Chat, template_kwargs: Mapping[str, Any]) -> Borders:
    """Probes the template; InputError with what was tried where its borders cannot be found."""
    question = {"role": "user", "content": _QUESTION}
    tried: list[str] = []
    for answer in ({"content": _ANSWER}, {"content": _ANSWER, "reasoning_content": _REASONING}):
        try:
            bare = chat.render([question], add_generation_prompt=False, **template_kwargs)
            prompt = chat.render([question], add_generation_prompt=True, **template_kwargs)
            messages = [question, {"role": "assistant", **answer}]
            whole = chat.render(messages, add_generation_prompt=False, **template_kwargs)
            generation_prompt, end, tail = _around(chat, bare, prompt, whole)
        except RowError as error:
            tried.append(f"an answer with {' and '.join(answer)}: {error}")
            continue
        return Borders(generation_prompt, _history_prompt(chat, bare, template_kwargs), end, tail)
    raise InputError(
        "the chat template does not show where an answer begins and ends, so no loss mask can be trusted. Tried with "
        f"a question and {'; then '.join(tried)}. Let the engine return its token ids (they need no template), or use "
        "a template that prints prompt, answer and end-of-turn token in that order"
    )


def _around(chat: Chat, bare: str, prompt: str, whole: str) -> tuple[str, str, str]:
    """Generation prompt, end of turn and tail; RowError that says what is not as it must be."""
    for name, text, words in (("prompt", prompt, _QUESTION), ("conversation", whole, _ANSWER)):
        if text.count(words) != 1:
            raise RowError(f"the rendered {name} holds its message {text.count(words)} times", repr(text))
    generation_prompt = prompt[num_shared(bare, prompt) :]  # some templates print an eos where none is asked for
    if not generation_prompt or _QUESTION in generation_prompt:
        raise RowError("add_generation_prompt appends nothing to the messages", f"{bare!r} became {prompt!r}")
    if not whole.startswith(prompt):
        raise RowError("the conversation does not begin with the prompt", f"{whole!r} against {prompt!r}")
    after = whole[whole.index(_ANSWER) + len(_ANSWER) :]
    return generation_prompt, *_end_of_turn(chat, after)


def num_shared(one: str, other: str) -> int:
    """How many characters both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _end_of_turn(chat: Chat, after: str) -> tuple[str, str]:
    """`after`, what follows an answer, as (end-of-turn token, the rest).

    A template may close the answer with a special token before that one; the target generates both.
    """
    special = {i for i, token in chat.tokenizer.get_added_tokens_decoder().items() if token.special} | chat.stop_ids
    encoding = chat.encode_with_offsets(after)
    closing = list(itertools.takewhile(special.__contains__, encoding.ids))
    if not closing:
        raise RowError("no end-of-turn token directly after the answer", f"{after!r} follows it")
    last = next((number for number, token in enumerate(closing) if token in chat.stop_ids), 0)
    end = encoding.offsets[last][1]
    return after[:end], after[end:]


def _history_prompt(chat: Chat, bare: str, template_kwargs: Mapping[str, Any]) -> str | None:
    """What stands between a question and an answer that another question follows."""
    follow_up = [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _REASONING}]
    try:
        question = {"role": "user", "content": _QUESTION}
        text = chat.render([question, *follow_up], add_generation_prompt=False, **template_kwargs)
    except RowError:
        return None
    is_plain = text.count(_QUESTION) == text.count(_ANSWER) == 1
    return text[num_shared(bare, text) : text.index(_ANSWER)] if is_plain else None
