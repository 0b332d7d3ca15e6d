"""Completions for the tests of tokenize: rows as files, with and without the engine's ids."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.chat.chat import Chat
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.tokenize.rows import RowBatch
from draftmill.tokenize.samples import Sample

COLOURS = ("red", "green", "blue", "yellow", "apple", "ten")


def row(number: int, **more: Any) -> dict[str, Any]:
    """A row whose answer grows with its number, so that no two are alike."""
    words = " ".join(COLOURS[(number + i) % len(COLOURS)] for i in range(5 + number))
    messages = [
        {"role": "user", "content": f"List some colours, {number} times."},
        {"role": "assistant", "content": words},
    ]
    return {"id": f"row-{number}", "messages": messages, "finish_reason": "stop", **more}


def with_engine_ids(chat: Chat, made: dict[str, Any], answer_ids: list[int]) -> dict[str, Any]:
    """The row with what an engine would have returned for its last message."""
    *asked, answer = made["messages"]
    prompt = chat.encode(chat.render(asked, add_generation_prompt=True))
    return {**made, "messages": [*asked, {**answer, "prompt_token_ids": prompt, "token_ids": answer_ids}]}


def write_rows(file: Path, rows: Sequence[dict[str, Any] | bytes]) -> Path:
    """A JSON-lines file; bytes are written as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in rows]
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return file


def settings(place: Path, source: Path, tokenizer: Path, **changes: Any) -> TokenizeSettings:
    """In this process, into `place`/samples, unless told otherwise."""
    given = {"input": str(source), "output": (str(place / "samples"),), "tokenizer": str(tokenizer), "workers": 1}
    return TokenizeSettings(**{**given, **changes})


def samples_of(batch: RowBatch) -> list[Sample]:
    """The batch's samples, one by one."""
    ends = np.cumsum(batch.lengths).tolist()
    cuts = zip(batch.sample_ids, [0, *ends], ends, batch.truncated.tolist(), strict=False)
    return [Sample(name, batch.input_ids[a:b], batch.loss_mask[a:b], is_cut) for name, a, b, is_cut in cuts]
