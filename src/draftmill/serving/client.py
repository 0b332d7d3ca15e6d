"""A client of one engine: sends a batch of prompts, returns the answers or says what the engine said. No torch.

Nothing is retried here: an engine on loopback that fails once has died, and a rerun of the room goes on where it was.
"""

from dataclasses import dataclass

import aiohttp
import msgspec

from draftmill.contracts.errors import ServingError
from draftmill.serving.dialects import readable
from draftmill.serving.protocol import Choice, Completion, Sampling, request_body

CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CompletionClient:
    """One engine at `url`, asked through one shared session."""

    session: aiohttp.ClientSession
    url: str
    model: str
    timeout_s: float
    """Longest wait for the whole answer to one request; an engine that decodes a batch sends nothing before its end."""

    async def complete(self, prompts: list[list[int]], sampling: Sampling, max_tokens: int) -> list[Choice]:
        """The answers in the order of the prompts; ServingError with the engine's own words where there are none."""
        body = request_body(self.model, prompts, sampling, max_tokens)
        completion = _completion(self.url, await self._post(body))
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(prompts))):
            raise ServingError(f"{self.url} answered {len(choices)} of {len(prompts)} prompts, or some of them twice")
        return choices

    async def _post(self, body: bytes) -> bytes:
        limits = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.post(
                f"{self.url}/v1/completions", data=body, headers=headers, timeout=limits
            ) as answer:
                text = await answer.read()
        except TimeoutError as error:
            raise ServingError(f"{self.url} gave no answer within {self.timeout_s:,.0f} s") from error
        except aiohttp.ClientError as error:
            raise ServingError(f"{self.url} cannot be asked: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise ServingError(f"{self.url} refused with HTTP {answer.status}: {readable(text)}")
        return text


def _completion(url: str, text: bytes) -> Completion:
    try:
        return msgspec.json.decode(text, type=Completion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServingError(f"{url} answered with no completion ({error}): {readable(text)}") from error
