"""How prompts are asked and answers judged: all that is the same for every row of a set."""

import hashlib
from dataclasses import dataclass
from typing import Any

from draftmill.chat.chat import Chat
from draftmill.contracts.errors import RecipeError
from draftmill.contracts.rows import Message, RowError
from draftmill.generate.answers import END_THINK, opens_thinking
from draftmill.generate.exclusion import Exclusion
from draftmill.serving.protocol import GREEDY, Sampling
from draftmill.settings.generate import GenerateSettings

_QUESTION: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
_SEED_BITS = 31  # engines keep seeds as signed numbers of 32 bits or more


@dataclass(frozen=True)
class Manner:
    """The target's tokenizer and template with their switches, and what a prompt and an answer may be."""

    chat: Chat
    settings: GenerateSettings
    exclusion: Exclusion | None
    window: int | None
    """Tokens that the target can see, prompt and answer together; None where nobody says."""
    thinks: bool | None
    """Whether answers are to begin with thinking; None: as the target likes."""

    def foreign_id(self, *lists: list[int] | None) -> int | None:
        """The first list's smallest or largest id that is not this tokenizer's; None where all are."""
        ends = (end for ids in lists if ids for end in (min(ids), max(ids)))
        return next((end for end in ends if not 0 <= end < self.chat.num_ids), None)

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        """The prompt as the engine will render it; RowError where the template refuses it."""
        try:
            return self.chat.render(messages, add_generation_prompt=True, tools=tools, **self.settings.switches)
        except RecursionError as error:
            raise RowError("nested too deeply", str(error)) from error

    def max_tokens(self, prompt_tokens: int) -> int:
        """The longest answer that the window has room for behind a prompt; 0 where it does not fit.

        Prompts that share a batch share one limit, so in-process a prompt fits when the longest answer does.
        """
        longest = self.settings.max_new_tokens
        if self.window is None:
            return longest
        room = self.window - prompt_tokens
        if not self.settings.endpoint:
            return longest if room >= longest else 0
        return max(0, min(longest, room))

    def sampling(self, row_id: str, turn: int) -> Sampling:
        """How the answer to one turn of a row is sampled: as set, with a seed of its own."""
        if not self.settings.endpoint:
            return GREEDY
        return sampling_of(self.settings, _seed(self.settings.seed, row_id, turn))


def sampling_of(settings: GenerateSettings, seed: int) -> Sampling:
    """The sampling that settings ask for."""
    return Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        repetition_penalty=settings.repetition_penalty,
        seed=seed,
    )


def _seed(seed: int, row_id: str, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{turn}:{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def wanted_thinking(chat: Chat, settings: GenerateSettings) -> bool | None:
    """Whether the target is to think, by the settings and by how its template opens an answer.

    RecipeError where the template does the opposite of what is set.
    """
    try:
        prompt = chat.render(_QUESTION, add_generation_prompt=True, **settings.switches)
    except RowError as error:
        raise RecipeError(f"the chat template of {settings.target} refuses a plain question: {error}") from error
    opens, closes = opens_thinking(prompt), prompt.rstrip().endswith(END_THINK)
    if (settings.thinking == "off" and opens) or (settings.thinking == "on" and closes):
        raise RecipeError(
            f"--thinking {settings.thinking}, but the chat template of {settings.target} opens an answer with "
            f"{prompt.rstrip()[-40:]!r}: it does not know enable_thinking; use its own switch by --template-kwargs, or "
            "leave --thinking out"
        )
    if settings.thinking == "on" and not (opens or settings.endpoint) and prompt == _switched_off(chat, settings):
        raise RecipeError(
            f"--thinking on, but the chat template of {settings.target} does not know enable_thinking, and no "
            "engine can be asked whether the target thinks: leave --thinking out"
        )
    if opens or closes:
        return opens
    return None if settings.thinking == "default" else settings.thinking == "on"


def _switched_off(chat: Chat, settings: GenerateSettings) -> str:
    switches = {**settings.switches, "enable_thinking": False}
    return chat.render(_QUESTION, add_generation_prompt=True, **switches)
