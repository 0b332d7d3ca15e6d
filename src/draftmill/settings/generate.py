"""Settings of `draftmill generate`, and of its gate."""

from typing import Any, Literal

from pydantic import Field, model_validator

from draftmill.contracts.split import Split
from draftmill.settings.base import RoomSettings, Settings, TemplateValue
from draftmill.settings.workers import usable_cores

_MOST_ROWS = (1 << 31) - 1  # a larger part is a slip
_TAKEN_SWITCHES = {"messages", "tools", "documents", "add_generation_prompt"}


class SamplingSettings(Settings):
    """How the target chooses its tokens. Every value is sent, whatever the engine's own defaults are, and recorded."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy: the answers that acceptance is measured against, and all that the in-process engines can do. A
    target that thinks is usually served at its model card's values (Qwen: 0.6, top_p 0.95, top_k 20)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Share of probability that is sampled from."""
    top_k: int = Field(-1, ge=-1)
    """Likeliest tokens that are sampled from; -1 for all (SGLang refuses 0)."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Smallest probability that is sampled, as a share of the likeliest token's."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logit of a token that occurred in the answer."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from a token's logit for each time it occurred in the answer."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logit of a token that occurred; 1 for none. Other than 1 the target says what it would not say."""
    seed: int = 0
    """Each answer is sampled with a seed of its own, derived from this one, the row's id and the turn."""


class ServedSettings(Settings):
    """How engines at --endpoint are asked."""

    endpoint: tuple[str, ...] = ()
    """Engines that serve the target (OpenAI-compatible, e.g. http://host:30000/v1), each once; without any, the target
    runs in processes on this host. An API key is read from OPENAI_API_KEY."""
    served_name: str | None = None
    """The target's name at the endpoints; by default, target itself."""
    tokenizer: str | None = None
    """Tokenizer and chat template of the target, by default target's: a local folder, a Hugging Face id, or
    package:NAME. Prompts are counted with it."""
    max_in_flight: int = Field(256, ge=1)
    """Most requests at once at one endpoint; how many are useful is found out by latency and errors."""
    max_attempts: int = Field(6, ge=1)
    """How often one answer is asked for, where the engine was busy (408, 409, 425, 429, 5xx) or not to be reached."""
    max_timeouts: int = Field(2, ge=1)
    """How many of these attempts may end in a timeout: an engine is seldom faster the next time."""
    max_failures_in_row: int = Field(20, ge=1)
    """Failures of an endpoint with no answer between them (those that happened together count once) after which it is
    given up: about five minutes. The run stops when all endpoints are."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Longest wait for a connection."""
    min_timeout_s: float = Field(60.0, gt=0)
    """Shortest time an answer is given; a long one gets more, by its tokens and the rate observed."""
    min_rate_tok_per_s: float = Field(5.0, gt=0)
    """Output tokens per second that one request is sure to get, before anything was observed."""
    require_token_ids: bool = False
    """Refuse endpoints that do not return the token ids that the target emitted."""
    spool: str | None = None
    """Local folder for answers whose part is not whole yet; by default below the cache ($DRAFTMILL_CACHE,
    or ~/.cache/draftmill)."""
    keep_finished: bool = False
    """Leave a finished set as it is; by default a rerun asks for its failed rows again."""


class AnswerLimits(Settings):
    """Which answers are kept. The others are stored in files of their own, with the reason, outside the set."""

    max_new_tokens: int = Field(2048, ge=1)
    """Longest answer, in tokens; less where the target's window has no room for it behind the prompt."""
    on_length: Literal["aside", "keep"] = "aside"
    """What becomes of an answer cut at its limit: it is set aside, or kept (its beginning is what the target writes,
    so a drafter can learn from it; as a conversation it is unfinished). A row of several
    turns whose answer before the last is cut is set aside in any case."""
    on_repetition: Literal["aside", "keep"] = "aside"
    """What becomes of an answer that ends in a short cycle."""
    cycle_tokens: int = Field(32, ge=1)
    """Longest cycle that counts as short: about two lines of text. Tables and code repeat with something new in each
    line, a locked answer repeats to the letter."""
    cycle_times: int = Field(8, ge=2)
    """How often it must have come around, to the very end."""
    cycle_run_tokens: int = Field(64, ge=1)
    """Tokens that the run of cycles must cover at least: `ha ha ha` is no fault."""
    cycle_run_frac: float = Field(0.25, ge=0, le=1)
    """Share of the answer that it must cover at least."""


class GenerateGate(Settings):
    """What the gate refuses. A share of fewer than min_judged rows is taken of min_judged: two bad rows are chance."""

    min_rows: int = Field(1, ge=1)
    """Fewest rows with an answer."""
    min_judged: int = Field(100, ge=1)
    """Fewer rows than this, in a part or in the set, count as this many."""
    max_failed_frac: float = Field(0.02, ge=0, le=1)
    """Largest share of rows that no endpoint answered; judged at the end, and a rerun asks for exactly them."""
    max_dropped_frac: float = Field(0.1, ge=0, le=1)
    """Largest share of rows that may be dropped, repeated and excluded ones apart."""
    max_duplicate_frac: float = Field(0.05, ge=0, le=1)
    """Largest share of rows that may repeat another's id or content."""
    max_empty_frac: float = Field(0.02, ge=0, le=1)
    """Largest share of rows whose answer may be empty."""
    max_cut_frac: float = Field(0.1, ge=0, le=1)
    """Largest share of rows whose answer may be cut."""
    max_repetition_frac: float = Field(0.05, ge=0, le=1)
    """Largest share of rows whose answer may end in a short cycle."""
    max_broken_frac: float = Field(0.02, ge=0, le=1)
    """Largest share of rows whose answer may be in the wrong mode, break its think tags, or be no valid text."""


class GenerateSettings(RoomSettings, SamplingSettings, ServedSettings, AnswerLimits, GenerateGate):
    """Lets the target answer prompts: engines at --endpoint, or greedily in engine processes on this host."""

    input: tuple[str, ...] = Field(min_length=1)
    """Prompts: .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, local or in an object store; a row holds messages (or
    conversations), or a prompt of plain text, and may hold an id. Answers in them are left out and generated anew."""
    output: tuple[str, ...] = Field(min_length=1)
    """Folders that receive the completions; may be given twice (local and s3://)."""
    target: str
    """The model that answers: a local folder, a Hugging Face id, or package:NAME."""
    split: Split = "all"
    """Which rows: train and held-out are told apart by a hash of the row's id, so they never share one."""
    held_out_frac: float = Field(0.1, ge=0, lt=1)
    """Share of the rows that are held out."""
    turns: Literal["own", "replay"] = "own"
    """own: a row of several turns is answered turn by turn on the target's own replies, all or nothing. replay: each
    recorded assistant turn is made anew from the recorded history before it, one row a turn (agent traces)."""
    import_answers: bool = False
    """Take rows whose last answer carries the target's own token_ids and prompt_token_ids as they are, unasked; the
    part files of a set made here are such rows."""
    exclude: tuple[str, ...] = ()
    """Evaluation sets: a prompt that shares a run of exclude_tokens with one is dropped and listed."""
    exclude_tokens: int = Field(13, ge=1)
    """Length of that run, in tokens of the target. Texts of fewer tokens exclude messages equal to them."""
    licence: tuple[str, ...] = ()
    """NAME=LICENCE for each prompt set, NAME being its file name; recorded in the card."""
    thinking: Literal["default", "on", "off"] = "default"
    """Whether the target thinks before it answers: on and off are passed to its chat template as enable_thinking."""
    template_kwargs: dict[str, TemplateValue] = Field({})
    """More switches of the chat template."""
    compression: Literal["none", "gzip", "zstd"] = "zstd"
    """Of the part files: .jsonl, .jsonl.gz or .jsonl.zst."""
    part_rows: int = Field(500, ge=1, le=_MOST_ROWS)
    """Prompts of one part; a part is published when its last prompt is done."""
    batch_rows: int = Field(48, ge=1)
    """In-process: prompts decoded together. Which prompts share a batch is fixed by the plan."""
    workers: int = Field(default_factory=usable_cores, ge=1)
    """In-process: engine processes; by default the cores it may use, and never more than fit into memory. The output
    does not depend on it."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """In-process: longest wait for one batch."""

    @model_validator(mode="after")
    def _fits_together(self) -> "GenerateSettings":
        if not self.endpoint and self.temperature > 0:
            raise ValueError(f"--temperature {self.temperature} needs --endpoint: in-process engines decode greedily")
        if self.thinking != "default" and "enable_thinking" in self.template_kwargs:
            raise ValueError("give --thinking or --template-kwargs enable_thinking, not both")
        if taken := sorted(self.template_kwargs.keys() & _TAKEN_SWITCHES):
            raise ValueError(f"--template-kwargs may not hold {', '.join(taken)}: the rows say that")
        if any("@" in url for url in self.endpoint):
            raise ValueError("the URL of an --endpoint may hold no password, because cards tell it: set OPENAI_API_KEY")
        if len(set(self.output)) < len(self.output):
            raise ValueError("an --output is given twice")
        return self

    @property
    def switches(self) -> dict[str, Any]:
        """All that the chat template is told."""
        return {
            **self.template_kwargs,
            **({} if self.thinking == "default" else {"enable_thinking": self.thinking == "on"}),
        }
