"""One conversation as a template is asked to print it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftmill.contracts.rows import Message


class Conversation(NamedTuple):
    """What was said, and what the template is asked with."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = {}
    is_cut: bool = False
    """Whether the last message was cut by its token limit: the end of turn that a template prints is nobody's."""

    @property
    def answer_places(self) -> list[int]:
        """Where in `messages` the answers are."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    def up_to(self, place: int) -> "Conversation":
        """As it was when message `place` had been said."""
        is_whole = place + 1 == len(self.messages)
        return self._replace(messages=self.messages[: place + 1], is_cut=self.is_cut and is_whole)

    def with_answer(self, place: int, answer: Message) -> "Conversation":
        """The same with another message at `place`."""
        return self._replace(messages=[*self.messages[:place], answer, *self.messages[place + 1 :]])
