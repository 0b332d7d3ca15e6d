"""Settings of `draftmill generate`, and of its gate."""

from typing import Literal

from pydantic import Field

from draftmill.contracts.split import Split
from draftmill.settings.base import RoomSettings
from draftmill.settings.workers import usable_cores


class GenerateSettings(RoomSettings):
    """Lets the target answer prompts, greedily, in engine processes on this host."""

    input: tuple[str, ...] = Field(min_length=1)
    """Prompts: .jsonl files, local or in an object store. Answers in them are left out and generated anew."""
    output: tuple[str, ...] = Field(min_length=1)
    """Folders that receive the completions; may be given twice (local and s3://)."""
    target: str
    """The model that answers: a local folder, a Hugging Face id, or package:NAME."""
    split: Split = "all"
    """Which rows: train and held-out are told apart by a hash of the row's id, so they never share one."""
    held_out_frac: float = Field(0.1, ge=0, lt=1)
    """Share of the rows that are held out."""
    max_new_tokens: int = Field(2048, ge=1)
    """Longest answer, in tokens."""
    on_length: Literal["drop", "keep"] = "drop"
    """What becomes of an answer cut at max_new_tokens: drop it, or keep it (its beginning is what the target writes,
    so a drafter can learn from it; as a conversation it is unfinished)."""
    batch_rows: int = Field(48, ge=1)
    """Prompts decoded together. Which prompts share a batch is fixed by the plan."""
    part_rows: int = Field(500, ge=1)
    """Prompts of one part; an interrupted part is made again, whole."""
    workers: int = Field(default_factory=usable_cores, ge=1)
    """Engine processes; by default the cores it may use, and never more than fit into memory. The output does not
    depend on it."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """Longest wait for one batch."""
    min_rows: int = Field(1, ge=1)
    """Fewest rows with an answer."""
    max_dropped_frac: float = Field(0.1, ge=0, le=1)
    """Largest share of rows that may be dropped, repeated ids and empty answers apart."""
    max_duplicate_frac: float = Field(0.05, ge=0, le=1)
    """Largest share of rows that may repeat another's id."""
    max_empty_frac: float = Field(0.02, ge=0, le=1)
    """Largest share of rows whose answer may be empty."""
    min_judged: int = Field(100, ge=1)
    """Fewer rows than this, in a part or in the set, are not judged by shares: two empty answers in a small part are
    chance."""
