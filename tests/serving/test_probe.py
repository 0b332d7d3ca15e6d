"""Before a run each endpoint is asked once, and one that would spoil the set is named with its fault."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from draftmill.contracts.errors import ServingError
from draftmill.serving.fleet import open_fleet
from draftmill.serving.probe import QUESTION, ProbeResult, ProbeWish
from draftmill.serving.protocol import GREEDY
from serving.fleets import chat, limits
from serving.stub_engine import StubEngine, read_faults
from tiny_tokenizer import write_tiny_tokenizer


def probed(*stubs: StubEngine, below: str = "", **changes: Any) -> list[ProbeResult]:
    """The results of probing the stubs, whose URL may be changed to another path."""
    usual = {"model": "stub", "thinking": None, "template_kwargs": {}, "sampling": GREEDY}
    wish = ProbeWish(**{**usual, **changes})

    async def story() -> list[ProbeResult]:
        async with AsyncExitStack() as stack:
            urls: Sequence[str] = [await stack.enter_async_context(stub.serving()) for stub in stubs]
            urls = [url.replace("/v1", below) if below else url for url in urls]
            async with open_fleet(urls, "stub", limits()) as fleet:
                results = await fleet.probe(wish)
                await fleet.ask(chat("after the probe"))
                return results

    return asyncio.run(story())


def test_a_probe_tells_window_and_token_ids() -> None:
    stubs = [StubEngine(window=5000), StubEngine(dialect="sglang"), StubEngine(gives_token_ids=False)]
    found = probed(*stubs)
    assert [(r.window_tokens, r.gives_token_ids) for r in found] == [
        (5000, True),
        (1 << 20, True),
        (1 << 20, False),
    ]
    assert all(r.url.startswith("http://127.0.0.1:") for r in found)
    assert [stub.hits[QUESTION] for stub in stubs] == [1, 1, 1]


def test_a_strict_server_is_asked_without_token_ids_from_then_on() -> None:
    stub = StubEngine(is_strict=True)
    (found,) = probed(stub)
    assert not found.gives_token_ids
    assert ["return_token_ids" in body for body in stub.asked] == [True, False, False]


def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    with pytest.raises(
        ServingError, match=r"1 of 1 endpoints.*\n.*does not serve 'Qwen/Qwen3.6-27B' but 'stub'.*--served"
    ):
        probed(StubEngine(), model="Qwen/Qwen3.6-27B")


def test_no_engine_at_all_is_told() -> None:
    async def story() -> None:
        async with open_fleet(["http://127.0.0.1:9/v1"], "stub", limits()) as fleet:
            await fleet.probe(ProbeWish(model="stub", thinking=None, template_kwargs={}, sampling=GREEDY))

    with pytest.raises(ServingError, match=r"http://127.0.0.1:9/v1: does not answer .*is the engine up"):
        asyncio.run(story())


def test_an_address_without_v1_is_told_where_to_look() -> None:
    with pytest.raises(ServingError, match=r"HTTP 404.*below http://127.0.0.1:[0-9]+/v1"):
        probed(StubEngine(), below="/")
    with pytest.raises(ServingError, match=r"HTTP 404.*below http://127.0.0.1:[0-9]+/v1$"):
        probed(StubEngine(), below="/v1/chat/completions")


@pytest.mark.parametrize(("dialect", "has_parser"), [("vllm", True), ("sglang", True), ("vllm", False)])
def test_thinking_is_seen_in_either_field_and_by_its_closing_tag(
    tmp_path: Path, dialect: Any, has_parser: bool
) -> None:
    folder = write_tiny_tokenizer(tmp_path, thinking=True)
    stub = StubEngine(tokenizer=folder, dialect=dialect, has_parser=has_parser)
    assert probed(stub, thinking=True)[0].gives_token_ids
    assert probed(stub, thinking=False, template_kwargs={"enable_thinking": False})[0].gives_token_ids
    with pytest.raises(ServingError, match="thinking is not wanted, but the model thinks"):
        probed(stub, thinking=False)
    with pytest.raises(ServingError, match=r"thinking is wanted, but .* neither reasoning_content nor reasoning"):
        probed(stub, thinking=True, template_kwargs={"enable_thinking": False})


def test_the_question_fits_into_a_small_window() -> None:
    stub = StubEngine(window=1000, thinks=True)
    assert probed(stub, thinking=True)[0].window_tokens == 1000
    assert stub.asked[0]["max_tokens"] == 500


def test_the_switch_stands_at_the_top_of_the_body() -> None:
    stub = StubEngine()
    probed(stub, template_kwargs={"enable_thinking": False})
    assert stub.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "extra_body" not in stub.asked[0]


def test_a_parser_that_takes_every_answer_for_thinking_is_found() -> None:
    stub = StubEngine(storm=read_faults("[[null]]")[0], storm_end_s=float("inf"))
    with pytest.raises(ServingError, match="all of the answer stands in the reasoning field and content is null"):
        probed(stub, thinking=False)
    probed(stub, thinking=True)


def test_every_endpoint_that_cannot_be_used_is_named() -> None:
    stormy = StubEngine(storm=read_faults("[[503]]")[0], storm_end_s=float("inf"))
    with pytest.raises(
        ServingError, match=r"2 of 3 endpoints(.|\n)*does not serve(.|\n)*HTTP 503: commanded 503\n.*others"
    ):
        probed(StubEngine(model="another"), StubEngine(), stormy)
