"""One row on its way: the target answers turn after turn, on its own earlier answers; all of them or none."""

from dataclasses import dataclass
from typing import Any

from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import ServingError
from draftmill.contracts.rows import Message, Row, RowError, aside, encode_row
from draftmill.generate.answers import FOREIGN_ID, Answer, fault_of, sort_out
from draftmill.generate.exclusion import EXCLUDED
from draftmill.generate.figures import AnswerFigures
from draftmill.generate.manner import Manner
from draftmill.generate.prompts import Prompt
from draftmill.serving.protocol import ChatAnswer, Choice, Sampling

TOO_LONG = "prompt too long for the target's window"


@dataclass(frozen=True)
class Asked:
    """What the target answers next."""

    messages: list[Message]
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Kept:
    """A row that is done, as one JSON line: part of the set, or set aside for `reason`."""

    id: str
    reason: str | None
    data: bytes
    figures: AnswerFigures

    @classmethod
    def of(cls, row: Row, reason: str | None, figures: AnswerFigures) -> "Kept":
        """The row as it is stored."""
        return cls(row.id, reason, encode_row(aside(row, reason) if reason else row), figures)


class Conversation:
    """`asked` is what the target answers next; None once the row is done: then `end` says how it ended."""

    def __init__(self, prompt: Prompt, manner: Manner) -> None:
        self.prompt = prompt
        self.asked: Asked | None = None
        self.end: Kept | Dropped | None = None
        self._manner = manner
        self._messages: list[Message] = []
        self._answers: list[Answer] = []
        self._requests: list[dict[str, Any]] = []
        self._num_differing = 0
        turns = [message for turn in prompt.turns for message in turn]
        if manner.exclusion and (place := manner.exclusion.find(turns)):
            self.end = prompt.dropped(EXCLUDED, place)
        else:
            self._ask_next()

    def take_choice(self, choice: Choice) -> None:
        """Adds an answer given as token ids alone. Text is decoded from them, special tokens inside it included."""
        assert self.asked is not None, "an answer belongs to a prompt"
        written = choice.token_ids if choice.finish_reason == "length" else choice.token_ids[:-1]
        self._take(
            Answer(
                content=self._manner.chat.decode(written),
                reasoning=None,
                tool_calls=None,
                finish_reason=choice.finish_reason,
                prompt_ids=self.asked.prompt_ids,
                token_ids=choice.token_ids,
                num_prompt_tokens=len(self.asked.prompt_ids),
                num_tokens=len(choice.token_ids),
            )
        )

    def take_chat(self, said: ChatAnswer) -> None:
        """Adds an answer given as a message; ServingError where the engine did not read what it was sent."""
        assert self.asked is not None, "an answer belongs to a prompt"
        ours = self.asked.prompt_ids
        theirs = said.prompt_token_ids
        num_theirs = said.prompt_tokens if theirs is None else len(theirs)
        is_same = theirs == ours if theirs is not None else num_theirs in (None, len(ours))
        if not is_same:
            self._refuse_lost_reasoning(theirs, num_theirs)
            self._num_differing += 1
        # Ids without their prompt are of use where the prompt is known all the same.
        prompt_ids = ours if theirs is None and num_theirs == len(ours) else theirs
        token_ids = said.token_ids if prompt_ids is not None else None
        text = (said.content or "", said.reasoning or "")
        self._take(
            Answer(
                content=text[0],
                reasoning=said.reasoning,
                tool_calls=said.tool_calls,
                finish_reason=said.finish_reason,
                prompt_ids=prompt_ids,
                token_ids=token_ids,
                num_prompt_tokens=len(ours) if num_theirs is None else num_theirs,
                num_tokens=self._num_tokens(said, "".join(text)),
            )
        )

    def _num_tokens(self, said: ChatAnswer, text: str) -> int:
        if said.num_tokens is not None:
            return said.num_tokens
        return len(self._manner.chat.encode(text.encode(errors="replace").decode()))

    def _refuse_lost_reasoning(self, theirs: list[int] | None, num_theirs: int | None) -> None:
        """ServingError where the engine's prompt is ours without the reasoning of earlier turns (vllm#38488)."""
        assert self.asked is not None
        bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in self.asked.messages]
        ids = self._manner.chat.encode(self._manner.render(bare, self.prompt.row.tools))
        if ids != self.asked.prompt_ids and (ids == theirs if theirs is not None else len(ids) == num_theirs):
            raise ServingError(
                f"row {self.prompt.id!r}: an endpoint left the reasoning of earlier turns out of the prompt (it read "
                f"{num_theirs} tokens, {len(self.asked.prompt_ids)} were sent), so later turns would answer another "
                "conversation: serve the target with an engine that reads reasoning_content or reasoning in messages"
            )

    def _take(self, answer: Answer) -> None:
        assert self.asked is not None
        thinks, limits = self._manner.thinks, self._manner.settings
        # Ids of another vocabulary cannot be read: the endpoint serves another model, or --tokenizer names another.
        is_foreign = self._manner.foreign_id(answer.prompt_ids, answer.token_ids) is not None
        if not is_foreign:
            answer = sort_out(answer, self._manner.chat, thinks=thinks)
        self._answers.append(answer)
        self._requests.append(self.asked.sampling.explicit(self.asked.max_tokens))
        self._messages.append(answer.message())
        self.asked = None
        is_last = len(self._answers) == len(self.prompt.turns)
        if is_foreign:
            self._close(FOREIGN_ID)
        elif fault := fault_of(answer, limits, thinks=thinks, is_last=is_last):
            self._close(fault)
        elif is_last:
            self._close(None)
        else:
            self._ask_next()

    def _ask_next(self) -> None:
        turn = len(self._answers)
        self._messages.extend(self.prompt.turns[turn])
        try:
            ids = self._manner.chat.encode(self._manner.render(self._messages, self.prompt.row.tools))
        except RowError as error:
            self.end = self.prompt.dropped(error.reason, error.detail)
            return
        max_tokens = self._manner.max_tokens(len(ids))
        if max_tokens < 1:
            self.end = self.prompt.dropped(TOO_LONG, f"{len(ids):,} tokens, window {self._manner.window:,}")
            return
        self.asked = Asked(self._messages, ids, max_tokens, self._manner.sampling(self.prompt.id, turn))

    def _close(self, reason: str | None) -> None:
        row = self.prompt.row
        made = Row(
            id=self.prompt.id,
            messages=tuple(self._messages),
            family=row.family,
            tools=row.tools,
            finish_reason=self._answers[-1].finish_reason,
            sampling=self._sampling(),
            only_last=self.prompt.id != row.id,
        )
        self.end = Kept.of(made, reason, AnswerFigures.of(self._answers, self._num_differing))

    def _sampling(self) -> dict[str, Any]:
        """As sent for the last turn, and what differed in turns before."""
        switches = self._manner.settings.switches
        earlier = [{key: sent[key] for key in ("seed", "max_tokens")} for sent in self._requests[:-1]]
        return {
            **self._requests[-1],
            **({"chat_template_kwargs": switches} if switches else {}),
            **({"earlier_turns": earlier} if earlier and self._manner.settings.endpoint else {}),
        }
