"""Prompts as read from their files: the split's rows cut into parts, and every row left out with its reason."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from draftmill.contracts.cards import Dropped, InputFile, part_name
from draftmill.contracts.errors import InputError, RecipeError
from draftmill.contracts.rows import Message, Row, RowError, iter_lines, read_row
from draftmill.contracts.split import is_in_split
from draftmill.settings.generate import GenerateSettings
from draftmill.storage.store import is_there, open_store

REPEATED_ID = "id of an earlier row"

Turn = tuple[Message, ...]


@dataclass(frozen=True)
class Prompt:
    """One row to answer: `turns` hold its messages up to each place where the target speaks."""

    row: Row
    turns: tuple[Turn, ...]
    file: str
    line: int

    def dropped(self, reason: str) -> Dropped:
        """The row, left out for `reason`."""
        return Dropped(file=self.file, line=self.line, id=self.row.id, reason=reason)


@dataclass
class PromptPart:
    """The prompts of one part, and the rows left out on the way to them."""

    name: str
    prompts: list[Prompt] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a split. `num_other` rows of the files belong to the other split."""

    files: tuple[InputFile, ...]
    parts: tuple[PromptPart, ...]
    num_other: int


def read_prompts(settings: GenerateSettings) -> PromptSet:
    """Reads every input file; InputError where no row is left to answer, with the reasons."""
    contents = [_read(url) for url in settings.input]
    reading = _Reading(settings)
    parts = [PromptPart(part_name(0))]
    for found in reading.rows(contents):
        if isinstance(found, Dropped):
            parts[-1].dropped.append(found)
            continue
        if len(parts[-1].prompts) == settings.part_rows:
            parts.append(PromptPart(part_name(len(parts))))
        parts[-1].prompts.append(found)
    if not parts[-1].prompts:
        raise InputError(_nothing_left(settings, reading.num_other, parts[-1].dropped))
    return PromptSet(tuple(file for file, _ in contents), tuple(parts), reading.num_other)


def _read(url: str) -> tuple[InputFile, bytes]:
    """The file's identity (named without its folder, so that a moved file is the same input) and content."""
    if not url.endswith(".jsonl"):
        raise RecipeError(f"{url}: prompts are read from .jsonl files, one JSON object a line")
    folder, _, name = url.rpartition("/")
    folder = folder or ("/" if url.startswith("/") else ".")
    content = open_store(folder).find(name) if is_there(folder) else None
    if content is None:
        raise InputError(f"{url}: no such file; --input names .jsonl files of prompts")
    identity = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return InputFile(key=name, size=len(content), identity=identity), content


@dataclass
class _Reading:
    settings: GenerateSettings
    num_other: int = 0
    _seen: set[str] = field(default_factory=set)

    def rows(self, contents: Sequence[tuple[InputFile, bytes]]) -> Iterator[Prompt | Dropped]:
        """Every row of the split, in order: a prompt, or what was left out. Other rows are reading."""
        for file, content in contents:
            for number, line in iter_lines(content):
                found = self._one(file.key, number, line)
                # A line without an id falls on a side by its place, so that it is reported once, not in both splits.
                split_id = (found.row.id if isinstance(found, Prompt) else found.id) or f"{file.key}:{number}"
                if is_in_split(split_id, self.settings.split, self.settings.held_out_frac):
                    yield found
                else:
                    self.num_other += 1

    def _one(self, file: str, line: int, data: bytes) -> Prompt | Dropped:
        try:
            row = read_row(data)
        except RowError as error:
            return Dropped(file=file, line=line, id=error.row_id, reason=error.reason)
        if row.id in self._seen:
            return Dropped(file=file, line=line, id=row.id, reason=REPEATED_ID)
        self._seen.add(row.id)
        try:
            return Prompt(row, cut_turns(row.messages), file, line)
        except RowError as error:
            return Dropped(file=file, line=line, id=row.id, reason=error.reason)


def cut_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The messages before each answer of the target, answers left out; RowError where the target has nothing to answer.

    system, user, assistant, user -> (system, user), (user).
    """
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            raise RowError("a tool message answers a call that is generated anew")
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif _has_user(turns[-1]):
            turns.append([])
    # An answer that ends the row leaves an empty turn. A system message behind it would be lost: not in silence.
    if not _has_user(turns[-1]) and (turns.pop() or not turns):
        raise RowError("no user message to answer")
    return tuple(tuple(turn) for turn in turns)


def _has_user(turn: Sequence[Message]) -> bool:
    return any(message["role"] == "user" for message in turn)


def _nothing_left(settings: GenerateSettings, num_other: int, dropped: Sequence[Dropped]) -> str:
    where = ", ".join(settings.input)
    if dropped:
        first = dropped[0]
        return (
            f"{where}: none of {len(dropped):,} rows is a prompt; the first, {first.file} line {first.line}: "
            f"{first.reason}"
        )
    if num_other:
        return (
            f"{where}: none of {num_other:,} rows falls into split {settings.split!r} at held_out_frac "
            f"{settings.held_out_frac}: give more rows, or another --held-out-frac"
        )
    return f"{where}: no rows; a prompt file has one JSON object a line"
