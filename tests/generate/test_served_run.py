"""Completions from served engines: none lost, none doubled, none in the wrong mode, whatever the engine does.

Row numbers are those of a list of faults that public pipelines of this kind have had.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from completion_sets import aside_of, card_of, check_parts, check_whole, lost_in, records_of, rows_of
from generate.served_runs import Desk, StubEngine, stub_at_work
from tiny import write_tiny_tokenizer
from tiny_tokenizer import write_tiny_tokenizer as write_bpe_tokenizer

pytestmark = pytest.mark.slow

SAMPLING = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
}
KEEPS_REASONING = (
    "{% for m in messages %}{{ m['role'] + ':' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:<think>\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe_tokenizer(tmp_path_factory.mktemp("thinking"), thinking=True)


@pytest.fixture
def desk(tmp_path: Path, plain: Path) -> Desk:
    return Desk(tmp_path, plain, {"part_rows": 4})


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def wait_for(what: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not what() and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def test_a_killed_run_goes_on_with_the_ids_that_are_missing(desk: Desk) -> None:
    """Rows 1 and 25: the first to be answered are not the first in the file."""
    desk.prompts([f"prompt {n}" + ("[[stall=30 x1]]" if n < 6 else "") for n in range(10)])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        process = desk.start(url)
        wait_for(lambda: len({*desk.spooled(), *ids(rows_of(desk.out))}) == 4, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        check_parts(desk.out)
        # In both for a moment, between publishing a part and forgetting its spool.
        assert {*desk.spooled(), *ids(rows_of(desk.out))} == {"r6", "r7", "r8", "r9"}
        assert desk.generate(url) == 0
        assert [stub.hits[f"prompt {n}"] for n in range(6, 10)] == [1, 1, 1, 1]
    check_whole(desk.out, (f"r{n}" for n in range(10)))
    assert ids(rows_of(desk.out)) == [f"r{n}" for n in range(10)]


def test_a_torn_line_costs_its_own_prompt_alone(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Row 2."""
    desk.prompts(["prompt 0", "prompt 1", "prompt 2[[stall=30 x1]]", "prompt 3[[stall=30 x1]]"])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        process = desk.start(url)
        wait_for(lambda: len(desk.spooled()) == 2, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        (file,) = (desk.folder / "spool").glob("*/part-00000.jsonl")
        whole = file.read_bytes()
        file.write_bytes(whole + whole[:12])
        assert desk.generate(url) == 0
        assert [stub.hits[f"prompt {n}"] for n in range(2)] == [1, 1]
    assert "cut 12 bytes of an unfinished line" in caplog.text
    check_whole(desk.out, (f"r{n}" for n in range(4)))


def test_line_separators_and_odd_ids_stay_one_row(desk: Desk) -> None:
    """Row 4, and ids as people have them."""
    odd = ["a\u2028b", "../../etc/passwd", "", None, 7, "7.0", "ü" * 5000, "tab\tnew\nline", "part-00000"]
    rows = [{"id": row_id, "prompt": f"one\u2028two\u2029three\u0085 {n}"} for n, row_id in enumerate(odd)]
    desk.prompts(rows)
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        assert desk.generate(url) == 0
    made = rows_of(desk.out)
    hashed = [row["id"] for row in made][2:4]
    check_whole(desk.out, [str(row_id) for row_id in odd if row_id not in ("", None)] + hashed)
    assert [row["messages"][0]["content"] for row in made] == [row["prompt"] for row in rows]
    assert {file.name[:5] for file in desk.out.iterdir()} == {"part-", "plan.", "card."}


def test_half_an_emoji_costs_its_own_row(desk: Desk) -> None:
    """Row 5."""
    desk.prompts([*(f"prompt {n}" for n in range(20)), "bad [[surrogate]]"])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        assert desk.generate(url) == 0
    check_whole(desk.out, (f"r{n}" for n in range(21)))
    assert len(rows_of(desk.out)) == 20
    (bad,) = aside_of(desk.out)
    assert bad["reason"] == "not valid Unicode text" and bad["messages"][-1]["content"].endswith("\ud83d")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_reasoning_is_saved_under_both_spellings_and_missed_when_it_is_not_there(
    thinking: Path, tmp_path: Path, dialect: str, with_ids: bool
) -> None:
    """Row 6."""
    desk = Desk(tmp_path, thinking, {})
    desk.prompts(["prompt 0", "prompt 1 [[wrong-mode]]"])
    with stub_at_work(tokenizer=thinking, dialect=dialect, gives_token_ids=with_ids) as (_, url):
        assert desk.generate(url) == 0
    (row,) = rows_of(desk.out)
    answer = row["messages"][-1]
    assert answer["reasoning_content"].startswith("Why ") and answer["content"].startswith("Answer ")
    assert ("token_ids" in answer) == with_ids == (card_of(desk.out)["engine_ids_frac"] == 1)
    assert card_of(desk.out)["thinking"] == "on" and card_of(desk.out)["thinking_frac"] == 1
    (bad,) = aside_of(desk.out)
    assert bad["reason"] in ("wrong mode: no thinking where it is wanted", "thinking never ended")


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_run_stops_where_the_engine_loses_the_reasoning_of_earlier_turns(
    tmp_path: Path, with_ids: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 7."""
    tokenizer = write_tiny_tokenizer(tmp_path / "target", chat_template=KEEPS_REASONING)
    talk = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    for history_key in ("both", "reasoning", "reasoning_content", "none"):
        desk = Desk(tmp_path / history_key, tokenizer, {})
        desk.prompts([{"id": "r", "messages": talk}])
        with stub_at_work(tokenizer=tokenizer, history_key=history_key, gives_token_ids=with_ids) as (_, url):
            assert desk.generate(url) == (1 if history_key == "none" else 0)
        if history_key != "none":
            assert all(m["reasoning_content"] for m in rows_of(desk.out)[0]["messages"] if m["role"] == "assistant")
    assert "left the reasoning of earlier turns out of the prompt" in capsys.readouterr().err


def test_what_the_engine_read_is_kept_where_its_template_is_another(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = write_tiny_tokenizer(
        tmp_path / "changed", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (changed / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    desk = Desk(tmp_path, changed, {})
    desk.prompts(["prompt 0", "prompt 1"])
    with stub_at_work(tokenizer=plain) as (stub, url):
        assert desk.generate(url) == 0
        read = stub.speaker.encode(stub.speaker.prompt(stub.asked[-1], stub.asked[-1]["messages"], thinks=False))
    assert read in [row["messages"][-1]["prompt_token_ids"] for row in rows_of(desk.out)]
    assert card_of(desk.out)["prompt_differs"] == 2
    assert "2 answers were given to another prompt" in capsys.readouterr().err


@pytest.mark.parametrize("on_length", ["aside", "keep"])
def test_unfinished_thinking_is_no_answer(thinking: Path, tmp_path: Path, on_length: str) -> None:
    """Rows 8 and 9, without ids and with every spelling of the fault."""
    desk = Desk(tmp_path, thinking, {"on_length": on_length})
    desk.prompts(["prompt 0", "prompt 1 [[null]]", "prompt 2 [[empty]]", "prompt 3 [[cut]]"])
    with stub_at_work(tokenizer=thinking, gives_token_ids=False, has_parser=False) as (_, url):
        assert desk.generate(url) == 0
    check_whole(desk.out, (f"r{n}" for n in range(4)))
    reasons = {row["id"]: row["reason"] for row in aside_of(desk.out)}
    assert reasons["r1"] == "cut at max_new_tokens" and reasons["r2"] == "empty answer"
    for row in rows_of(desk.out):
        assert row["messages"][-1]["content"] and row["messages"][-1]["reasoning_content"]
    assert sum(card_of(desk.out)["set_aside"].values()) == len(reasons)


class Muddled(StubEngine):
    """Puts all of an answer into the reasoning field (sgl-project/sglang#20786)."""

    def _parsed(self, text: str, ids: list[int], *, thinks: bool, finish_reason: str) -> Any:
        answer = super()._parsed(text, ids, thinks=thinks, finish_reason=finish_reason)
        return type(answer)(answer.ids, text, None, finish_reason)


def test_an_engine_in_the_wrong_mode_is_refused_before_the_first_prompt(
    thinking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 10."""
    desk = Desk(tmp_path, thinking, {"thinking": "off"})
    desk.prompts(["prompt"])
    with stub_at_work(Muddled, tokenizer=thinking) as (stub, url):
        assert desk.generate(url) == 1
        assert stub.hits["prompt"] == 0
    assert "thinking is not wanted, but all of the answer stands in the reasoning field" in capsys.readouterr().err
    assert not list(desk.out.glob("part*"))


def test_switches_and_every_sampling_value_are_sent_and_recorded(thinking: Path, tmp_path: Path) -> None:
    """Rows 11 and 23."""
    desk = Desk(
        tmp_path, thinking, {**SAMPLING, "thinking": "off", "template_kwargs": {"lang": "de", "level": 3, "x": True}}
    )
    desk.prompts(["prompt"])
    with stub_at_work(tokenizer=thinking) as (stub, url):
        assert desk.generate(url, max_new_tokens=77) == 0
        body = stub.asked[-1]
    switches = {"enable_thinking": False, "lang": "de", "level": 3, "x": True}
    assert body["chat_template_kwargs"] == switches and "extra_body" not in body
    (row,) = rows_of(desk.out)
    seed = row["sampling"]["seed"]
    sent = {**SAMPLING, "max_tokens": 77, "seed": seed}
    assert isinstance(seed, int) and {key: body[key] for key in sent} == sent
    assert row["sampling"] == {**sent, "chat_template_kwargs": switches}
    assert "reasoning_content" not in row["messages"][-1]


def test_answers_get_the_room_that_the_window_leaves(desk: Desk) -> None:
    """Row 16."""
    desk.prompts(["short", "long " * 30, "too long " * 90])
    with stub_at_work(tokenizer=desk.tokenizer, window=200, answer_tokens=20) as (stub, url):
        assert desk.generate(url, max_new_tokens=150, on_length="keep") == 0
        asked = {body["messages"][-1]["content"]: body["max_tokens"] for body in stub.asked}
        assert stub.hits["too long " * 90] == 0
    assert asked["short"] == 150 and 1 <= asked["long " * 30] < 150
    (dropped,) = lost_in(desk.out, "dropped")
    assert (dropped["id"], dropped["reason"]) == ("r2", "prompt too long for the target's window")
    assert "window 200" in dropped["detail"]


def test_a_stuck_prompt_delays_its_own_part_alone(desk: Desk) -> None:
    """Row 18."""
    desk.prompts([f"prompt {n}" + ("[[stall=60 x1]]" if n == 0 else "") for n in range(40)])
    with stub_at_work(tokenizer=desk.tokenizer) as (_, url):
        process = desk.start(url)
        wait_for(lambda: len(records_of(desk.out)) == 9, process)
        check_parts(desk.out)
        assert "part-00000" not in [record["name"] for record in records_of(desk.out)]
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate()
        assert process.returncode == 130 and json.loads(stdout.splitlines()[-1])["exit_code"] == 130
        assert desk.generate(url) == 0
    check_whole(desk.out, (f"r{n}" for n in range(40)))


def test_later_turns_are_asked_on_the_targets_own_replies(desk: Desk) -> None:
    """Row 21: all turns or none, the system prompt kept."""
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "the recorded reply"},
        {"role": "user", "content": "second"},
    ]
    broken = [{**m, "content": m["content"] + (" [[empty]]" if m["content"] == "second" else "")} for m in talk]
    desk.prompts([{"id": "whole", "messages": talk}, {"id": "half", "messages": broken}])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url) == 0
        second = next(body for body in stub.asked if body["messages"][-1]["content"] == "second")
    (row,) = rows_of(desk.out)
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    reply = row["messages"][2]["content"]
    assert [m["content"] for m in second["messages"]] == ["be brief", "first", reply, "second"]
    assert "recorded" not in json.dumps(stub.asked)
    assert [(bad["id"], bad["reason"], len(bad["messages"])) for bad in aside_of(desk.out)] == [
        ("half", "empty answer", 5)
    ]


def test_recorded_turns_are_made_anew_one_row_a_turn(desk: Desk) -> None:
    """Agent traces: recorded calls and tool results stay in the history."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    trace = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "calling", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "it is 2"},
    ]
    desk.prompts([{"id": "t", "messages": trace, "tools": [{"type": "function", "function": {"name": "add"}}]}])
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url, turns="replay") == 0
        (second,) = [body for body in stub.asked if len(body["messages"]) == 3]
    assert second["messages"][1]["tool_calls"] == [call] and second["messages"][2]["tool_call_id"] == "c1"
    assert second["tools"][0]["function"]["name"] == "add"
    rows = rows_of(desk.out)
    assert [(row["id"], len(row["messages"]), row["only_last"]) for row in rows] == [("t#0", 2, True), ("t#1", 4, True)]
    assert rows[1]["messages"][1]["content"] == "calling" and rows[1]["messages"][3]["content"] != "it is 2"
    check_whole(desk.out, ["t#0", "t#1"])


def test_the_numbers_agree_and_another_run_does_nothing_or_is_refused(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 22."""
    good = {"id": "a", "prompt": "x"}
    desk.prompts(
        [good, {"id": "b", "prompt": "y"}, {"id": "c", "prompt": " "}, good, {"id": "d", "prompt": "z [[400]]"}]
    )
    with (desk.folder / "p.jsonl").open("a") as stream:
        stream.write('\n{"id": "e", "prompt": "w [[loop]]"}\n{broken\n\n')
    with stub_at_work(tokenizer=desk.tokenizer) as (stub, url):
        assert desk.generate(url) == 0
        card = card_of(desk.out)
        assert (card["rows_in"], card["rows"]) == (7, 2)
        assert card["set_aside"] == {"ends in a short cycle": 1}
        assert card["dropped"] == {"an empty user message": 1, "broken JSON": 1, "id of an earlier row": 1}
        assert card["failed"] == {"refused with HTTP 400": 1}
        check_whole(desk.out, "abde")
        asked = len(stub.asked)
        assert "7 rows in" in capsys.readouterr().err
        before = {file: file.read_bytes() for file in desk.out.iterdir()}
        assert desk.generate(url, max_new_tokens=5) == 2
        assert "already holds another generate set: max_new_tokens was 2048, is 5" in capsys.readouterr().err
        assert desk.generate(url, keep_finished=True) == 0
        assert len(stub.asked) == asked and before == {file: file.read_bytes() for file in desk.out.iterdir()}
        desk.prompts([good, {"id": "new", "prompt": "y"}])
        assert desk.generate(url) == 2
        assert "its inputs differ" in capsys.readouterr().err
        assert before == {file: file.read_bytes() for file in desk.out.iterdir()}
