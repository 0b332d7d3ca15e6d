"""Settings of `draftmill evaluate`."""

from typing import Literal

from pydantic import Field, model_validator

from draftmill.settings.base import RoomSettings, refuse_gpus_of_a_cpu
from draftmill.settings.workers import MOST_THREADS


class EvaluateSettings(RoomSettings):
    """A drafter and its target in, acceptance length out, by lossless greedy decoding and by the parallel walk."""

    checkpoint: str
    """The drafter: a training run (its newest checkpoint), one checkpoint's folder, or an exported folder."""
    input: tuple[str, ...] = Field(min_length=1)
    """Held-out prompts: completions sets of this target, made greedily, or prompt files (.jsonl, .jsonl.gz,
    .jsonl.zst or .parquet), which are only decoded. May be given more than once."""
    target: str
    """The model drafted for: a local folder, a Hugging Face id, or package:NAME."""
    output: tuple[str, ...] = Field(min_length=1)
    """Folders (local or s3://) that receive the evaluation; may be given twice."""
    decode_prompts: int = Field(24, ge=1)
    """Prompts decoded plainly and speculatively; chosen by a hash, spread evenly over the families."""
    decode_prompts_untrained: int = Field(8, ge=0)
    """How many of these are also decoded with the run's initial weights (step 0), where the run still has them."""
    max_new_tokens: int = Field(64, ge=2)
    """Tokens of an answer that count; a longer one is cut there."""
    reported_apart: tuple[str, ...] = ()
    """Families reported beside the others and left out of the headline figures; may be given more than once."""
    prefill_tokens: int = Field(2048, ge=1)
    """Prompt tokens the target reads in one pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to decode; auto takes a CUDA device where there is one."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What target and drafter compute in. bfloat16 takes half the memory, and is what the CUDA kernels of linear
    attention (Qwen3.5, 3.6) need; it rounds more, so that larger ties are excused."""
    target_gpus: int = Field(1, ge=1)
    """CUDA devices that the target is spread over, layer by layer."""
    threads: int = Field(1, ge=1, le=MOST_THREADS)
    """CPU threads of the decoding; figures are equal to the last bit at the same number only."""
    seed: int = 0
    """Chooses the decoded prompts."""
    min_tau: float = Field(0.0, ge=0)
    """Refuse (exit 3) an acceptance length below this; 0 refuses none."""

    @model_validator(mode="after")
    def _fits_together(self) -> "EvaluateSettings":
        refuse_gpus_of_a_cpu(self.device, self.target_gpus)
        return self
