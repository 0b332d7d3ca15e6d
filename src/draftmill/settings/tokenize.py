"""Settings of `draftmill tokenize`, and of the gate that it shares with `draftmill inspect`."""

import re
from datetime import date
from typing import Literal

from pydantic import Field, model_validator

from draftmill.settings.base import RoomSettings, TemplateValue
from draftmill.settings.workers import usable_cores

Turns = Literal["faithful", "expand", "all", "last"]


class GateSettings(RoomSettings):
    """What the gate refuses. Shares lie in 0..1; a threshold that refuses is raised (or lowered) by its own flag."""

    max_spike_frac: float = Field(0.2, ge=0, le=1)
    """Largest share of samples that may have exactly one and the same small number of supervised tokens."""
    spike_tokens: int = Field(16, ge=1)
    """What counts as small: up to one block. An empty answer has 1 to 10 tokens; a spike at a cap is no fault."""
    min_supervised_frac: float = Field(0.05, ge=0, le=1)
    """Smallest share of all tokens that must be supervised."""
    max_dropped_frac: float = Field(0.1, ge=0, le=1)
    """Largest share of rows that may be dropped, repeated ids apart."""
    max_duplicate_frac: float = Field(0.05, ge=0, le=1)
    """Largest share of rows that may repeat another's id, and of samples that may repeat another's tokens."""
    mask_id: int | None = Field(None, ge=0)
    """The drafter's mask token, where it is known already: samples that hold it are counted, for train drops them."""
    min_judged: int = Field(20, ge=1)
    """Fewer rows or samples than this are shown but not judged: a share of so few says nothing."""


class TokenizeSettings(GateSettings):
    """Turns answers into token ids and loss masks."""

    input: str
    """Completions: a set made by generate (local or s3://), or a folder or file of .jsonl, .jsonl.gz or .jsonl.zst."""
    output: tuple[str, ...] = Field(min_length=1)
    """Folders that receive the samples; may be given twice (local and s3://)."""
    tokenizer: str
    """Tokenizer and chat template of the target: a local folder, a Hugging Face id, or package:NAME."""
    also: tuple[Literal["jsonl"], ...] = ()
    """jsonl: the finished set once more as JSON lines of input_ids and loss_mask, for SpecForge and speculators."""
    turns: Turns = "faithful"
    """Which answers are supervised: faithful, those behind the very prompt the target saw; expand, the same as one
    sample per answer, so that no earlier thinking is lost; all, every one; last, the last one of each row. Answers that
    carry their engine's token ids are verbatim in any case, and join only where each is the beginning of the next."""
    template_kwargs: dict[str, TemplateValue] = Field({})
    """What the prompts of rows were rendered with that do not say so themselves, e.g. enable_thinking."""
    template_date: date | None = None
    """The day (2026-11-30) on which the answers were generated, for a chat template that prints the day."""
    max_tokens: int = Field(3072, ge=2)
    """Longest sample, in tokens; a longer one is cut there and flagged (3072 is the paper's length)."""
    part_bytes: int = Field(200_000_000, ge=1)
    """Bytes of one shard, about: foretold from the sizes of its inputs. A part is made by one worker, whole or not at
    all; a larger compressed file makes a larger one."""
    workers: int = Field(default_factory=usable_cores, ge=1)
    """Processes; by default the cores it may use. 1 works in this process. The output does not depend on it."""
    worker_growth_bytes: int = Field(1 << 30, ge=1 << 20)
    """Memory a worker may gain before a fresh one takes its place: the tokenizer's cache has no bound."""
    store_patience_s: float = Field(600, ge=0)
    """Longest silence of an object store that is waited out, in seconds."""
    shard: str | None = None
    """i/n (1/4 to 4/4): make every n-th part, from the i-th on. n such runs, wherever they are, make the set;
    the last closes it."""
    engine: Literal["local", "ray", "slurm"] = "local"
    """Where parts are made: on this machine, or as tasks of a Ray cluster or a Slurm array (draftmill[cluster])."""
    tasks: int | None = Field(None, ge=1)
    """Tasks of an engine; by default one for each part."""
    task_cores: int = Field(1, ge=1)
    """Cores, and processes, of one task of an engine."""
    task_memory_gb: int = Field(2, ge=1)
    """Memory of one task of an engine, in gigabytes for each of its cores."""
    slurm_partition: str | None = None
    """Where Slurm is to run the tasks."""
    slurm_time: str = "24:00:00"
    """Longest time of a Slurm task, hours:minutes:seconds."""

    def makes(self, index: int) -> bool:
        """Whether this run makes part `index` (from 0)."""
        if self.shard is None:
            return True
        which, of = map(int, self.shard.split("/"))
        return index % of == which - 1

    @model_validator(mode="after")
    def _engine_and_shard_can_be(self) -> "TokenizeSettings":
        if self.shard is not None:
            found = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", self.shard)
            if found is None or int(found[1]) > int(found[2]):
                raise ValueError(f"--shard {self.shard}: give i/n with i from 1 to n, for example 1/4")
            if self.engine != "local":
                raise ValueError(f"--shard {self.shard} with --engine {self.engine}: an engine's tasks are the shards")
        if self.engine == "slurm" and self.slurm_partition is None:
            raise ValueError("--engine slurm needs to know where its tasks may run: give --slurm-partition")
        return self
