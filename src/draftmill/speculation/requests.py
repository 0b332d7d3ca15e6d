"""What is evaluated: prompts with the target's own answers out of completions sets, or prompts alone out of files.

Every assistant turn that carries the engine's token ids is one request: its prompt as the target saw it, and the
answer it gave. Rows that cannot be used are listed with file, line, id and reason.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftmill.chat.chat import Chat
from draftmill.contracts.cards import Dropped, InputFile, count_reasons, told_reasons
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import Message, Row, RowError, read_row
from draftmill.storage.row_files import ROW_SUFFIXES, find_row_file, numbered_lines
from draftmill.storage.sets import open_set

NO_FAMILY = "all"


@dataclass(frozen=True)
class Request:
    """One prompt, and the target's own greedy answer where it is known (empty otherwise)."""

    id: str
    family: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Material:
    """Everything read from the inputs."""

    files: tuple[InputFile, ...]
    requests: tuple[Request, ...]
    left_out: tuple[Dropped, ...]


def read_material(urls: Sequence[str], chat: Chat, num_rows: int) -> Material:
    """Requests of all inputs, in order, for a target whose embedding has `num_rows` rows.

    InputError where there is none, an answer was not made greedily, or a token is none of the target's.
    """
    files: list[InputFile] = []
    requests: list[Request] = []
    left_out: list[Dropped] = []
    for url in urls:
        for file, lines in _files(url):
            files.append(file)
            for number, line in lines:
                try:
                    found = _requests(read_row(line), chat, is_prompt=url.endswith(ROW_SUFFIXES))
                    _refuse_foreign_ids(found, f"{file.key} line {number}", num_rows)
                    requests += found
                except RowError as error:
                    left_out.append(Dropped(file=file.key, line=number, id=error.row_id, reason=error.reason))
    if not requests:
        told = told_reasons(count_reasons(left_out)) or "they hold no row"
        raise InputError(f"{', '.join(urls)}: nothing to evaluate in {len(files)} files ({told})")
    return Material(tuple(files), _distinct(requests), tuple(left_out))


def _refuse_foreign_ids(requests: Iterable[Request], where: str, num_rows: int) -> None:
    for request in requests:
        for token_id in (*request.prompt_ids, *request.answer_ids):
            if not 0 <= token_id < num_rows:
                raise InputError(
                    f"{where}: row {request.id!r} holds token id {token_id}, but the target's embedding has "
                    f"{num_rows:,} rows: these prompts or answers are another target's"
                )


def _files(url: str) -> Iterator[tuple[InputFile, Iterator[tuple[int, bytes]]]]:
    """Every file with its numbered lines."""
    if url.endswith(ROW_SUFFIXES):
        prompts = find_row_file(url)
        yield prompts.file, prompts.lines()
        return
    reader = open_set(url, "generate")
    for file in reader.inputs:
        yield file, numbered_lines(reader.local(file), file.key)


def _requests(row: Row, chat: Chat, *, is_prompt: bool) -> list[Request]:
    family = row.family or NO_FAMILY
    if is_prompt:
        messages = list(row.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        text = chat.render(messages, add_generation_prompt=True, tools=row.tools)
        return [Request(row.id, family, tuple(chat.encode(text)), ())]
    if (row.sampling or {}).get("temperature", 0):
        raise InputError(
            f"row {row.id} was sampled at temperature {(row.sampling or {})['temperature']}, but acceptance is "
            "measured against greedy answers: generate the held-out prompts with --temperature 0"
        )
    turns = [message for message in row.messages if message["role"] == "assistant"]
    if not turns or any("token_ids" not in turn or "prompt_token_ids" not in turn for turn in turns):
        raise RowError("an answer without the engine's token ids", row_id=row.id)
    return [_request(row.id if len(turns) == 1 else f"{row.id}#{n}", family, turn) for n, turn in enumerate(turns)]


def _request(request_id: str, family: str, turn: Message) -> Request:
    if not turn["token_ids"] or not turn["prompt_token_ids"]:
        raise RowError("an empty prompt or answer", row_id=request_id)
    return Request(request_id, family, tuple(turn["prompt_token_ids"]), tuple(turn["token_ids"]))


def _distinct(requests: Iterable[Request]) -> tuple[Request, ...]:
    by_id: dict[str, Request] = {}
    for request in requests:
        if by_id.setdefault(request.id, request) != request:
            raise InputError(f"two different rows have the id {request.id!r}: give every row an id of its own")
    return tuple(by_id.values())


def fitting(requests: Iterable[Request], max_new_tokens: int, max_positions: int) -> list[Request]:
    """Those whose prompt and `max_new_tokens` more have room in the target's window."""
    return [request for request in requests if len(request.prompt_ids) + max_new_tokens <= max_positions]


def choose(requests: Sequence[Request], apart: Sequence[str], count: int, seed: int) -> list[Request]:
    """`count` requests of the headline families in turn, the order within a family given by a hash: never by position.

    A prefix of the choice is itself spread evenly.
    """
    families = sorted({request.family for request in requests} - set(apart))
    if not families:
        raise InputError(f"every family is reported apart ({', '.join(sorted(set(apart)))}): none is left to measure")
    queues = [
        sorted((r for r in requests if r.family == family), key=lambda r: (_shuffle(r, seed), r.id))
        for family in families
    ]
    rounds = max(map(len, queues))
    return [queue[turn] for turn in range(rounds) for queue in queues if turn < len(queue)][:count]


def _shuffle(request: Request, seed: int) -> str:
    return hashlib.blake2b(f"{seed}:{request.id}".encode(), digest_size=8).hexdigest()
