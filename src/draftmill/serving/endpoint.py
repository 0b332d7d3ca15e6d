"""One engine behind one URL, asked through one pool of connections. Retries are the fleet's."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from draftmill.serving import failures
from draftmill.serving.dialects import BadAnswerError, chat_body, read_answer
from draftmill.serving.failures import RequestRefusedError, Setback
from draftmill.serving.health import Health
from draftmill.serving.limits import FleetLimits
from draftmill.serving.protocol import GREEDY, ChatAnswer, ChatRequest

SPARE_CONNECTIONS = 2  # for probe and trial
IDLE_CONNECTION_S = 3.0
"""Engines close idle connections after 5 s (uvicorn's default); a request sent in that moment would be lost."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 30, socket.TCP_KEEPCNT: 4}
"""Seconds and tries of TCP keepalive: a long answer is minutes of silence, after which routers forget a connection
(350 s at some), and a host that lost power is noticed after three."""
TRIAL = ChatRequest(messages=[{"role": "user", "content": "Hi"}], max_tokens=1, sampling=GREEDY)
"""One token of the model itself: a health check may lie."""
_UNFINISHED = ("abort", "error")
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class EndpointFigures:
    """What one endpoint has done so far, and how it is."""

    url: str
    requests: int
    output_tokens: int
    retries: dict[str, int]
    """Failures that are tried again, by class."""
    concurrency: int
    """Requests it may be given at once, as of now."""
    in_flight: int
    is_up: bool


@dataclass(eq=False)
class Endpoint:
    """One engine at `url` (…/v1), serving `model`. Whoever asks it holds one of its places (dispatch.py)."""

    url: str
    model: str
    session: aiohttp.ClientSession
    limits: FleetLimits
    asks_token_ids: bool = True
    in_flight: int = 0
    num_requests: int = 0
    output_tokens: int = 0
    setbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.health = Health(self.limits, self._clock)

    @property
    def has_room(self) -> bool:
        """Whether it may be given one more request."""
        return self.health.is_up and self.in_flight < self.health.concurrency.limit

    @property
    def load(self) -> float:
        """Requests in flight as a share of those it may have."""
        return self.in_flight / self.health.concurrency.limit

    async def ask(self, request: ChatRequest, num_timeouts: int) -> ChatAnswer:
        """The answer to one request; Setback or RequestRefusedError where there is none."""
        sent_s, was_full = self._clock(), not self.has_room
        self.num_requests += 1
        try:
            answer = await self.attempt(request, self.health.patience.timeout_s(request.max_tokens, num_timeouts))
        except Setback as setback:
            self.setbacks[setback.kind] += 1
            self.health.failed(setback, sent_s)
            raise
        except RequestRefusedError as error:
            if error.is_of_the_endpoint:
                self.health.failed(_as_setback(error), sent_s)
            raise
        num_tokens = _num_tokens(answer)
        self.output_tokens += num_tokens
        self.health.answered(sent_s, num_tokens, was_full=was_full)
        return answer

    async def try_again(self) -> None:
        """Waits until a trial is due and makes it."""
        while (wait_s := self.health.trial_due_s - self._clock()) > 0:  # a later Retry-After puts it off
            await asyncio.sleep(wait_s)
        sent_s = self._clock()
        try:
            await self.attempt(TRIAL, self.limits.min_timeout_s)
        except (Setback, RequestRefusedError) as error:
            self.health.failed(_as_setback(error), sent_s)
        else:
            self.health.passed_trial()

    async def attempt(self, request: ChatRequest, timeout_s: float) -> ChatAnswer:
        """One attempt, of which nothing is noted."""
        try:
            body = chat_body(self.model, request, asks_token_ids=self.asks_token_ids)
        except UnicodeEncodeError as error:
            raise RequestRefusedError(None, f"the request cannot be sent: {error.reason}") from error
        try:
            answer = read_answer(await self.exchange("POST", "/chat/completions", body, timeout_s))
        except BadAnswerError as error:
            raise Setback(failures.BAD_BODY, str(error)) from error
        if answer.finish_reason in _UNFINISHED:
            raise Setback(failures.ABORTED, f"finish_reason {answer.finish_reason!r}")
        return answer

    async def exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """The body of a response with status 200; Setback or RequestRefusedError where there is none."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.limits.connect_timeout_s)
        try:
            async with self.session.request(method, self.url + path, data=body, timeout=timeout) as response:
                data = await response.read()
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise Setback(failures.CONNECT, str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise Setback(failures.TIMEOUT, f"no whole answer within {timeout_s:,.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Setback(failures.CONNECTION, f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise failures.refusal(response.status, response.headers, data)
        return data

    def figures(self) -> EndpointFigures:
        """As of now."""
        return EndpointFigures(
            url=self.url,
            requests=self.num_requests,
            output_tokens=self.output_tokens,
            retries=dict(self.setbacks),
            concurrency=self.health.concurrency.limit,
            in_flight=self.in_flight,
            is_up=self.health.is_up,
        )


def _as_setback(error: Setback | RequestRefusedError) -> Setback:
    return error if isinstance(error, Setback) else Setback(f"HTTP {error.status}", str(error))


def _num_tokens(answer: ChatAnswer) -> int:
    """Tokens of an answer, guessed from its length where the engine does not tell."""
    if answer.num_tokens is not None:
        return answer.num_tokens
    return (len(answer.reasoning or "") + len(answer.content or "")) // _CHARS_PER_TOKEN


@asynccontextmanager
async def connected(url: str, model: str, limits: FleetLimits) -> AsyncIterator[Endpoint]:
    """The endpoint at `url`, with a pool of as many connections as it may have requests."""
    headers = {"Content-Type": "application/json"}
    if limits.api_key:
        headers["Authorization"] = f"Bearer {limits.api_key}"
    pool = aiohttp.TCPConnector(
        limit=limits.max_in_flight + SPARE_CONNECTIONS,
        keepalive_timeout=IDLE_CONNECTION_S,
        socket_factory=kept_alive,
    )
    async with aiohttp.ClientSession(connector=pool, headers=headers, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield Endpoint(url, model, session, limits)


def kept_alive(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for `address` that is kept alive while nothing is said."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
