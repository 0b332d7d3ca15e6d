"""`Chat`: one target's tokenizer and chat template, read from its folder with `tokenizers` and `jinja2` alone."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import Encoding, Tokenizer, processors

from draftmill.chat.reading import Reading, read
from draftmill.chat.template import (
    TOKENIZER_CONFIG_FILE,
    Clock,
    compile_template,
    read_template,
    render,
    special_tokens,
    template_environment,
)
from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import Message, RowError

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class Chat:
    """Renders, encodes and decodes as the target's engine does."""

    tokenizer: Tokenizer
    template: jinja2.Template
    reading: Reading
    """What the template reads."""
    clock: Clock
    """What it is told of the time."""
    special_tokens: dict[str, str]
    """What the template knows as `bos_token`, `eos_token` and so on."""
    stop_ids: frozenset[int]
    """Ids that end a turn: the tokenizer's eos and those of the generation configuration."""
    tokenizer_hash: str
    """sha256 of tokenizer.json, 64 hex digits."""
    template_hash: str
    """sha256 of the template's text, 64 hex digits."""

    @cached_property
    def num_ids(self) -> int:
        """Ids from here on are not this tokenizer's."""
        added = self.tokenizer.get_added_tokens_decoder()
        count = max([self.tokenizer.get_vocab_size(with_added_tokens=False), *(token_id + 1 for token_id in added)])
        while self.tokenizer.id_to_token(count) is not None:  # a vocabulary with holes has ids beyond its size
            count += 1
        return count

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the template prints it; RowError where the template refuses it."""
        variables = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return render(self.template, messages, **{**self.special_tokens, **variables, **template_kwargs})

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. Special tokens in it are recognised, none are added (the template prints its own)."""
        return self.encode_with_offsets(text).ids

    def encode_with_offsets(self, text: str) -> Encoding:
        """Ids and, for each, the half-open range of characters it stands for; RowError for a lone surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError("not valid Unicode text", f"{error.reason} at character {error.start}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def open_chat(folder: Path, today: date | None = None) -> Chat:
    """The tokenizer and template in a target's folder; InputError that says the cure where one is missing.

    A template that asks for the time is told `today`, or the host's own time.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise InputError(
            f"{folder} has no {TOKENIZER_FILE}: save it there with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder), or name another folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise InputError(f"{file} cannot be read as a tokenizer: {error}; save it again, or fetch it again") from error
    tokenizer.no_truncation()  # a tokenizer saved after a truncating call would cut every row
    tokenizer.no_padding()
    # Special tokens are the template's to print; what else a post-processor does is to trim spaces off offsets, which
    # would hide that a token straddles a border.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    config = _read_json(folder / TOKENIZER_CONFIG_FILE)
    special = special_tokens(config)
    clock = Clock(today)
    text, environment = read_template(folder, config), template_environment(clock)
    return Chat(
        tokenizer=tokenizer,
        template=compile_template(text, environment, str(folder)),
        reading=read(text, environment),
        clock=clock,
        special_tokens=special,
        stop_ids=_stop_ids(tokenizer, special, _read_json(folder / GENERATION_FILE)),
        tokenizer_hash=hashlib.sha256(file.read_bytes()).hexdigest(),
        template_hash=hashlib.sha256(text.encode()).hexdigest(),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not a JSON object: {error}") from error


def _stop_ids(tokenizer: Tokenizer, special: dict[str, str], generation: dict[str, Any]) -> frozenset[int]:
    listed = generation.get("eos_token_id")
    ids = {found for found in (listed if isinstance(listed, list) else [listed]) if isinstance(found, int)}
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset(ids if eos is None else ids | {eos})
