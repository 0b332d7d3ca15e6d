"""Rows of conversation: read leniently, written strictly.

A row has `id`, `messages` (`role`, `content`, `reasoning_content`, optional `tool_calls`), optional `tools` and
`family`, and as a completion `finish_reason`, `sampling` and `only_last`; an assistant message may carry the engine's
own `prompt_token_ids` and `token_ids`. Also read: `conversations` (`from`/`value`), `prompt`/`response`, `reasoning`
and `thinking`.
"""

import hashlib
import itertools
import json
from typing import Any, Literal

import msgspec

JSONL, JSONL_GZIP, JSONL_ZSTD = JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Files of rows, plain or packed."""
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Two names of one thing: a row that gives both must mean the same by them.
_TWINS = (("role", "from"), ("content", "value"), *itertools.combinations(_REASONING_KEYS, 2))
_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "prompt_token_ids", "token_ids"}

Message = dict[str, Any]


class RowError(ValueError):
    """A row that cannot be read; `reason` is a short fixed phrase that drops are counted by."""

    def __init__(self, reason: str, detail: str = "", row_id: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.row_id = row_id


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One conversation; `messages` hold normalised keys only."""

    id: str
    messages: tuple[Message, ...]
    family: str | None = None
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    only_last: bool = False
    """Only the last answer is the target's own; answers before it were recorded elsewhere and came with the prompt."""


class AsideRow(Row, frozen=True, kw_only=True, omit_defaults=True):
    """A row kept out of the set, and why."""

    reason: str


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The commonest message. Any other is read leniently."""

    role: Literal["system", "user", "assistant"]
    content: str | None = None
    reasoning_content: str | None = None

    def as_message(self) -> Message:
        message: Message = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class _PlainRow(msgspec.Struct):
    """A row of such messages; decoded by type it costs half of what any JSON does."""

    messages: list[_PlainMessage]
    id: str | int | None = None
    family: str | None = None
    tools: None = None
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    only_last: bool | None = None


_plain_row = msgspec.json.Decoder(_PlainRow)


def read_row(line: bytes) -> Row:
    """The row a JSON line holds; RowError with the reason where it holds none."""
    try:
        plain = _plain_row.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_leniently(line)
    if not plain.messages:
        return _read_leniently(line)
    messages = tuple([message.as_message() for message in plain.messages])
    row_id = _hashed_id(messages) if plain.id is None or plain.id == "" else str(plain.id)
    return Row(
        id=row_id,
        messages=messages,
        family=plain.family,
        finish_reason=plain.finish_reason,
        sampling=plain.sampling,
        only_last=bool(plain.only_last),
    )


def _read_leniently(line: bytes) -> Row:
    try:
        raw = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))  # a byte order mark before the first row
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowError("broken JSON", str(error)) from error
    if not isinstance(raw, dict):
        raise RowError("not a JSON object", type(raw).__name__)
    row_id = _given_id(raw)
    try:
        messages = tuple(_message(m) for m in _raw_messages(raw))
    except RowError as error:
        raise RowError(error.reason, error.detail, row_id) from error
    if not messages:
        raise RowError("no messages", row_id=row_id)
    return Row(
        id=row_id or _hashed_id(messages),
        messages=messages,
        family=_optional(raw, "family", str, row_id),
        tools=_optional(raw, "tools", list, row_id),
        finish_reason=_optional(raw, "finish_reason", str, row_id),
        sampling=_optional(raw, "sampling", dict, row_id),
        only_last=bool(_optional(raw, "only_last", bool, row_id)),
    )


def _given_id(raw: dict[str, Any]) -> str | None:
    value = raw.get("id")
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError("id is neither text nor a whole number", repr(value)[:80])
    return str(value)


def _hashed_id(messages: tuple[Message, ...]) -> str:
    return hashlib.blake2b(msgspec.json.encode(messages, order="sorted"), digest_size=8).hexdigest()


def _raw_messages(raw: dict[str, Any]) -> list[Any]:
    for key in ("messages", "conversations"):
        if raw.get(key) is not None:
            if not isinstance(raw[key], list):
                raise RowError(f"{key} is not a list", type(raw[key]).__name__)
            return raw[key]
    if isinstance(raw.get("prompt"), str):
        reply = [{"role": "assistant", "content": raw["response"]}] if raw.get("response") is not None else []
        return [{"role": "user", "content": raw["prompt"]}, *reply]
    if raw.get("prompt") is not None:
        kind = type(raw["prompt"]).__name__
        raise RowError("prompt is not text", f"it is a {kind}; a list of messages is read from messages")
    raise RowError("no messages, conversations or prompt", f"the row has {sorted(raw)[:8]}")


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise RowError("a message is not an object", type(raw).__name__)
    for given, twin in _TWINS:
        one, other = (ROLES.get(v, v) if isinstance(v, str) else v for v in (raw.get(given), raw.get(twin)))
        if one is not None and other is not None and one != other:
            raise RowError("one thing said twice", f"a message has {given} and {twin}, and they differ")
    raw = {("role" if k == "from" else "content" if k == "value" else k): v for k, v in raw.items()}
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError("unknown role", repr(role)[:40])
    role = ROLES[role]
    if not isinstance(raw.get("content"), str | None):
        raise RowError("content is not text", f"{role} content is a {type(raw['content']).__name__}")
    if unknown := sorted(k for k, v in raw.items() if v and k not in _MESSAGE_KEYS and k not in _REASONING_KEYS):
        raise RowError(
            "unknown message key", f"{role} message has {unknown}; rename or remove it, so that no text is lost"
        )
    message = {"role": role, "content": raw.get("content")}
    message |= {k: raw[k] for k in sorted(_MESSAGE_KEYS - {"role", "content"}) if raw.get(k) is not None}
    for key in _REASONING_KEYS:
        if raw.get(key) is not None:
            if not isinstance(raw[key], str):
                raise RowError("reasoning is not text", f"{key} is a {type(raw[key]).__name__}")
            message["reasoning_content"] = raw[key]
            break
    return message


def _optional(raw: dict[str, Any], key: str, kind: type, row_id: str | None) -> Any:
    value = raw.get(key)
    if value is not None and not isinstance(value, kind):
        raise RowError(f"{key} is not a {kind.__name__}", repr(value)[:80], row_id)
    return value


def encode_row(row: Row) -> bytes:
    """The row as one JSON line, newline included. A lone surrogate (half an emoji) is written as its escape."""
    try:
        return msgspec.json.encode(row) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(row), separators=(",", ":")).encode() + b"\n"


def aside(row: Row, reason: str) -> AsideRow:
    """The row as it is kept out of the set."""
    return AsideRow(**msgspec.structs.asdict(row), reason=reason)
