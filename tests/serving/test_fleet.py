"""Requests are answered once each by whichever engine can, retried by class, and never hang; a dead fleet is told."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from draftmill.contracts.errors import RecipeError, ServingError
from draftmill.serving.failures import AttemptsExhaustedError, FleetDownError, RequestRefusedError
from draftmill.serving.fleet import Fleet, open_fleet
from draftmill.serving.protocol import ChatAnswer
from serving.fleets import chat, limits
from serving.stub_engine import StubEngine, read_faults, started_stub

T = TypeVar("T")


def told(stubs: Sequence[StubEngine], story: Callable[[Fleet], Awaitable[T]], **changes: Any) -> T:
    """What the story returns, told with a fleet over the stubs."""

    async def telling() -> T:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(stub.serving()) for stub in stubs]
            return await story(await stack.enter_async_context(open_fleet(urls, "stub", limits(**changes))))

    return asyncio.run(telling())


async def outcomes(fleet: Fleet, texts: Sequence[str]) -> list[ChatAnswer | BaseException]:
    return await asyncio.gather(*(fleet.ask(chat(text)) for text in texts), return_exceptions=True)


def asking(*texts: str) -> Callable[[Fleet], Awaitable[list[ChatAnswer | BaseException]]]:
    return lambda fleet: outcomes(fleet, texts)


def test_each_class_of_failure_is_tried_as_often_as_it_should_be() -> None:
    once = ["[[400]]", "[[404]]", "[[413]]", "[[422]]", "good"]
    retried = ["408", "409", "425", "429", "500", "502", "503", "reset", "close", "garbage", "half", "abort"]
    twice = ["[[429 after=1 x1]] by seconds", *(f"[[{fault} x1]]" for fault in retried)]
    stub = StubEngine()
    began_s = time.monotonic()
    found = told([stub], asking(*once, *twice), max_failures_in_row=50)
    assert time.monotonic() - began_s > 1, "the Retry-After was waited for"
    assert {text: stub.hits[text] for text in once + twice} == {**dict.fromkeys(once, 1), **dict.fromkeys(twice, 2)}
    assert [answer.status for answer in found[:4] if isinstance(answer, RequestRefusedError)] == [400, 404, 413, 422]
    assert all(isinstance(answer, ChatAnswer) for answer in found[4:])


def test_a_request_that_always_fails_is_given_up_and_others_are_not() -> None:
    stub = StubEngine()
    bad, *good = told([stub], asking("[[500]]", *(f"good {n}" for n in range(50))))
    assert isinstance(bad, AttemptsExhaustedError) and bad.reasons == {"HTTP 500": 5}
    assert stub.hits["[[500]]"] == 5
    assert all(isinstance(answer, ChatAnswer) for answer in good)


def test_an_engine_that_never_answers_times_out_and_a_slow_one_is_asked_twice_at_most() -> None:
    for fault in ("silent", "stall=5"):
        stub = StubEngine()
        (bad,) = told([stub], asking(f"[[{fault}]]"), min_timeout_s=0.1, min_rate_tok_per_s=1e6)
        assert isinstance(bad, AttemptsExhaustedError) and bad.reasons == {"timeout": 2}
        assert stub.hits[f"[[{fault}]]"] == 2


def test_a_second_try_has_twice_the_time() -> None:
    stub = StubEngine()
    (late,) = told([stub], asking("[[stall=1]]"), min_timeout_s=0.7, min_rate_tok_per_s=1e6)
    assert isinstance(late, ChatAnswer)


@pytest.mark.parametrize("fault", ["close", "503", "silent"])
def test_a_fleet_that_answers_nothing_is_told_after_failures_in_a_row(fault: str) -> None:
    stub = StubEngine(storm=read_faults(f"[[{fault}]]")[0], storm_end_s=float("inf"))
    texts = [f"prompt {n}" for n in range(40)]
    found = told([stub], asking(*texts), max_failures_in_row=6, min_timeout_s=0.1, min_rate_tok_per_s=1e6)
    down = [error for error in found if isinstance(error, FleetDownError)]
    assert len(down) == 40
    assert "http://127.0.0.1" in str(down[0]) and "6 failures in a row" in str(down[0])
    assert stub.requests < 40, "most prompts were never sent, and can be tried again"


def test_a_fleet_that_may_not_fail_is_stopped_by_its_first_failure() -> None:
    stub = StubEngine(storm=read_faults("[[503]]")[0], storm_end_s=float("inf"))
    found = told([stub], asking(*(f"prompt {n}" for n in range(40))), max_failures_in_row=1)
    assert sum(isinstance(error, FleetDownError) for error in found) == 40
    assert stub.requests <= 8, "those that were sent together"


def test_a_port_without_an_engine_is_told_as_well() -> None:
    async def story() -> None:
        async with open_fleet(["http://127.0.0.1:9/v1"], "stub", limits(max_failures_in_row=3)) as fleet:
            await fleet.ask(chat("hello"))

    with pytest.raises(FleetDownError, match="3 failures in a row, the last: no connection"):
        asyncio.run(story())


def test_an_endpoint_whose_every_request_is_refused_stops_the_run() -> None:
    stub = StubEngine(model="another")
    found = told([stub], asking(*(f"prompt {n}" for n in range(40))), max_failures_in_row=4)
    refused = [error for error in found if isinstance(error, RequestRefusedError)]
    assert len(refused) < 40 and len(refused) + sum(isinstance(error, FleetDownError) for error in found) == 40


def test_refusals_of_single_requests_never_stop_a_run() -> None:
    found = told([StubEngine()], asking(*(f"[[400]] {n}" for n in range(60)), "good"), max_failures_in_row=2)
    assert isinstance(found[-1], ChatAnswer)


def test_no_endpoint_gets_more_than_it_may_have_and_the_load_is_shared() -> None:
    stubs = [StubEngine(latency_s=0.02), StubEngine(latency_s=0.02), StubEngine(latency_s=1.0)]
    found = told(stubs, asking(*(f"prompt {n}" for n in range(100))), max_in_flight=6)
    assert all(isinstance(answer, ChatAnswer) for answer in found)
    assert max(stub.most_in_flight for stub in stubs) == 6
    assert sum(stub.requests for stub in stubs) == 100
    fast, other, slow = (stub.requests for stub in stubs)
    assert min(fast, other) > 25, "equal engines share"
    assert 6 <= slow <= 18, "a slow engine gets what it has places for"


def test_an_engine_that_limits_requests_is_given_as_many_as_it_takes() -> None:
    async def story(fleet: Fleet) -> tuple[list[ChatAnswer | BaseException], int]:
        found = await outcomes(fleet, [f"prompt {n}" for n in range(300)])
        return found, fleet.figures()[0].concurrency

    stub = StubEngine(most=5, latency_s=0.01)
    found, concurrency = told([stub], story, max_in_flight=64, max_attempts=20)
    assert all(isinstance(answer, ChatAnswer) for answer in found)
    assert concurrency <= 8
    assert stub.requests < 400


def test_connections_are_used_again() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def story(fleet: Fleet) -> tuple[int, int]:
        await outcomes(fleet, [f"warm up {n}" for n in range(100)])
        before = count()
        await outcomes(fleet, [f"prompt {n}" for n in range(500)])
        return before, count()

    before, after = told([StubEngine()], story, max_in_flight=32)
    assert before == after


def test_a_connection_is_kept_alive_while_a_long_answer_is_made() -> None:
    """Linux shows a running keepalive timer as `02:` (proc_net_tcp); without one, routers forget the silent pair."""

    async def story() -> list[str]:
        stub = StubEngine()
        async with stub.serving() as url, open_fleet([url], "stub", limits()) as fleet:
            asked = asyncio.create_task(fleet.ask(chat("[[stall=1]]")))
            while not stub.in_flight:
                await asyncio.sleep(0.01)
            port = f":{int(url.split(':')[2].split('/')[0]):04X}"
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            await asked
            return [row[5] for row in rows if row[2].endswith(port) and row[3] == "01"]

    (timer,) = asyncio.run(story())
    assert timer.startswith("02:")


def test_cancelled_requests_leave_their_places() -> None:
    async def story(fleet: Fleet) -> list[ChatAnswer | BaseException]:
        for at_s in (0.0, 0.01, 0.03):
            doomed = [asyncio.create_task(fleet.ask(chat(f"[[stall=9]] {n} {at_s}"))) for n in range(20)]
            await asyncio.sleep(at_s)
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            assert fleet.figures()[0].in_flight == 0
        return await asyncio.wait_for(outcomes(fleet, [f"prompt {n}" for n in range(40)]), 10)

    assert all(isinstance(answer, ChatAnswer) for answer in told([StubEngine()], story, max_in_flight=4))


def test_an_engine_that_dies_is_replaced_by_the_others_and_used_again_when_it_is_back() -> None:
    async def story() -> tuple[list[ChatAnswer | BaseException], Fleet]:
        stub = StubEngine(latency_s=0.005)
        async with stub.serving() as url, started_stub("--latency-s", "0.005") as mortal:
            port = mortal.url.split(":")[2].split("/")[0]
            async with open_fleet([url, mortal.url], "stub", limits(max_attempts=4)) as fleet:
                asked = asyncio.create_task(outcomes(fleet, [f"prompt {n}" for n in range(400)]))
                await asyncio.sleep(0.1)
                mortal.process.kill()
                found = await asked
                dead = fleet.figures()[1]
                assert not dead.is_up and sum(dead.retries.values()) > 0
                async with started_stub("--port", port):
                    while not fleet.figures()[1].is_up:
                        await asyncio.sleep(0.02)
                    found += await outcomes(fleet, [f"later {n}" for n in range(40)])
                assert fleet.figures()[1].requests > dead.requests
            return found, fleet

    found, _ = asyncio.run(asyncio.wait_for(story(), 30))
    assert len(found) == 440 and all(isinstance(answer, ChatAnswer) for answer in found)


def test_requests_wait_for_an_engine_that_restarts() -> None:
    async def story() -> list[ChatAnswer | BaseException]:
        async with started_stub("--latency-s", "0.05") as mortal:
            port = mortal.url.split(":")[2].split("/")[0]
            async with open_fleet([mortal.url], "stub", limits(max_failures_in_row=1000)) as fleet:
                asked = asyncio.create_task(outcomes(fleet, [f"prompt {n}" for n in range(50)]))
                await asyncio.sleep(0.1)
                mortal.process.kill()
                await asyncio.sleep(0.5)
                async with started_stub("--port", port):
                    return await asked

    found = asyncio.run(asyncio.wait_for(story(), 30))
    assert all(isinstance(answer, ChatAnswer) for answer in found)


def test_half_an_emoji_costs_neither_a_retry_nor_a_run() -> None:
    stub = StubEngine()
    answer, refused = told([stub], asking("[[surrogate]]", "asked \ud83d"))
    assert isinstance(answer, ChatAnswer) and str(answer.content).endswith("\ud83d")
    assert isinstance(refused, RequestRefusedError) and "cannot be sent" in str(refused)
    assert stub.requests == 1


def test_a_prompt_beyond_the_window_is_refused_once_in_the_engines_words() -> None:
    stub = StubEngine(window=40)
    (refused,) = told([stub], asking("a prompt of some length"))
    assert isinstance(refused, RequestRefusedError) and "maximum context length is 40" in str(refused)
    assert stub.requests == 1


@pytest.mark.parametrize("history_key", ["reasoning", "reasoning_content"])
def test_reasoning_in_the_history_reaches_engines_that_know_one_spelling(history_key: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "user", "content": "c"},
    ]

    async def story(fleet: Fleet) -> ChatAnswer:
        return await fleet.ask(chat("", messages=messages))

    heard = told([StubEngine(history_key=history_key)], story)
    assert heard.prompt_token_ids is not None and b"because" in bytes(heard.prompt_token_ids)
    deaf = told([StubEngine(history_key="none")], story)
    assert deaf.prompt_tokens is not None and deaf.prompt_tokens < len(heard.prompt_token_ids)


def test_the_key_is_sent_and_never_shown() -> None:
    keyed = limits(api_key="sk-secret")
    assert "sk-secret" not in repr(keyed)

    async def story() -> str | None:
        stub = StubEngine()
        async with stub.serving() as url, open_fleet([url + "/"], "stub", keyed) as fleet:
            await fleet.ask(chat("hello"))
            return stub.keys.pop()

    assert asyncio.run(story()) == "Bearer sk-secret"


def test_figures_count_requests_tokens_and_retries() -> None:
    async def story(fleet: Fleet) -> Any:
        await outcomes(fleet, ["a", "b", "[[503 x2]]"])
        return fleet.figures()

    (figures,) = told([StubEngine()], story)
    assert (figures.requests, figures.retries, figures.is_up, figures.in_flight) == (5, {"HTTP 503": 2}, True, 0)
    assert figures.output_tokens > 60


def test_what_is_no_url_is_told() -> None:
    async def story() -> None:
        async with open_fleet(["localhost:8000"], "stub", limits()):
            raise AssertionError("never open")

    with pytest.raises(RecipeError, match="like http://host:8000/v1"):
        asyncio.run(story())


def test_errors_of_the_fleet_are_explained_not_traced() -> None:
    assert issubclass(RequestRefusedError, ServingError)
    assert issubclass(AttemptsExhaustedError, ServingError) and issubclass(FleetDownError, ServingError)
