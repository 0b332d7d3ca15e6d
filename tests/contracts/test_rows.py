"""Promise: rows are read leniently, nothing that holds text is lost in silence, and lines are cut at 0x0A alone."""

import json

import pytest

from draftmill.contracts.rows import Row, RowError, aside, encode_row, read_row


def line(**row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def test_three_spellings_of_a_conversation_read_the_same() -> None:
    by_messages = read_row(
        line(id=1, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    )
    by_turns = read_row(line(id=1, conversations=[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]))
    by_prompt = read_row(line(id="1", prompt="a", response="b"))
    assert by_messages == by_turns == by_prompt


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_every_spelling_of_reasoning_is_kept(key: str) -> None:
    row = read_row(line(messages=[{"role": "assistant", "content": "b", key: "why"}]))
    assert row.messages[0]["reasoning_content"] == "why"


def test_a_byte_order_mark_is_no_part_of_the_first_row() -> None:
    assert read_row(b"\xef\xbb\xbf" + line(prompt="a")) == read_row(line(prompt="a"))


def test_a_row_without_id_is_named_by_its_content() -> None:
    one, same, other = (read_row(line(prompt=text)) for text in ("a", "a", "b"))
    assert one.id == same.id != other.id
    assert len(one.id) == 16


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"messages": [', "broken JSON"),
        (b'{"prompt": "\\ud83d"}', "broken JSON"),
        (b"\xff\xfe", "broken JSON"),
        (b"[" * 5_000, "broken JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"text": "a"}', "no messages, conversations or prompt"),
        (b'{"prompt": [{"role": "user", "content": "a"}]}', "prompt is not text"),
        (b'{"messages": []}', "no messages"),
        (b'{"messages": "hi"}', "messages is not a list"),
        (b'{"messages": [7]}', "a message is not an object"),
        (b'{"messages": [{"role": "model", "content": "a"}]}', "unknown role"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "unknown role"),
        (b'{"messages": [{"role": "user", "content": [1]}]}', "content is not text"),
        (b'{"messages": [{"role": "user", "content": "a", "thoughts": "b"}]}', "unknown message key"),
        (b'{"id": [1], "prompt": "a"}', "id is neither text nor a whole number"),
        (b'{"prompt": "a", "tools": "x"}', "tools is not a list"),
        (b'{"messages": [{"role": "user", "reasoning": [1]}]}', "reasoning is not text"),
    ],
)
def test_what_cannot_be_read_says_why(raw: bytes, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read_row(raw)
    assert caught.value.reason == reason


def test_a_bad_row_keeps_its_id_for_the_list_of_drops() -> None:
    with pytest.raises(RowError) as caught:
        read_row(line(id="row-7", messages=[{"role": "model", "content": "a"}]))
    assert caught.value.row_id == "row-7"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\r", "\n", "\x0c"])
def test_a_row_is_written_as_one_line_whatever_its_text(separator: str) -> None:
    row = Row(id="x", messages=({"role": "user", "content": f"a{separator}b"},))
    assert encode_row(row).index(b"\n") == len(encode_row(row)) - 1
    assert read_row(encode_row(row)) == row


def test_half_an_emoji_is_written_as_its_escape_and_the_row_says_why_it_is_aside() -> None:
    row = Row(id="a", messages=({"role": "assistant", "content": "half \ud83d"},), only_last=True)
    line = encode_row(aside(row, "not valid text"))
    assert b"\\ud83d" in line and line.endswith(b"\n")
    found = json.loads(line)
    assert (found["reason"], found["messages"][0]["content"]) == ("not valid text", "half \ud83d")
    whole = Row(id="a", messages=({"role": "user", "content": "\u2028"},), only_last=True)
    assert read_row(encode_row(whole)) == whole


ODD_ROWS: list[dict[str, object]] = [
    {},
    {"id": 7},
    {"id": ""},
    {"id": None, "finish_reason": "length", "sampling": {"seed": 1}, "family": "f", "only_last": True, "more": [1]},
    {"id": True},
    {"id": 1.5},
    {"tools": []},
    {"tools": [{"type": "function"}]},
    {"family": 3},
    {"finish_reason": {}},
    {"sampling": "x"},
    {"only_last": "yes"},
    {"conversations": [{"from": "human", "value": "other"}]},
    {"prompt": "other"},
]
ODD_MESSAGES: list[object] = [
    [],
    None,
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}],
    [{"role": "user", "content": None}, {"role": "assistant", "reasoning_content": None}],
    [{"role": "human", "content": "a"}, {"from": "gpt", "value": "b"}],
    [{"role": "developer", "content": "a"}, {"role": "tool", "content": "1", "tool_call_id": "x", "name": "f"}],
    [{"role": "assistant", "content": "b", "thinking": "c", "reasoning": ""}],
    [{"role": "assistant", "content": "b", "tool_calls": [], "extra": ""}],
    [{"role": "assistant", "content": "b", "token_ids": [1], "prompt_token_ids": [2]}],
    [{"role": "user", "content": ["a"]}],
    [{"role": "user", "content": "a", "role ": "x"}],
]


def _read(raw: bytes) -> Row | str:
    try:
        return read_row(raw)
    except RowError as error:
        return f"{error.reason} {error.row_id}"


@pytest.mark.parametrize("odd", ODD_ROWS, ids=str)
def test_rows_read_by_type_are_those_read_leniently(odd: dict[str, object]) -> None:
    """A byte order mark before the row makes the reader take the lenient way."""
    for messages in ODD_MESSAGES:
        raw = line(**{**({} if messages is None else {"messages": messages}), **odd})
        assert _read(raw) == _read(b"\xef\xbb\xbf" + raw)


@pytest.mark.parametrize("twins", [{"content": "a", "value": "b"}, {"reasoning": "a", "thinking": "b"}])
def test_two_names_of_one_thing_that_differ_are_refused(twins: dict[str, str]) -> None:
    with pytest.raises(RowError, match="one thing said twice"):
        read_row(line(messages=[{"role": "user", "content": "a"}, {"role": "assistant", **twins}]))
    same = dict.fromkeys(twins, "a")
    assert read_row(line(messages=[{"role": "user", "from": "human", "content": "q"}, {"role": "assistant", **same}]))
