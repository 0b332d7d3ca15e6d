"""Settings of `draftmill estimate`."""

from pydantic import Field

from draftmill.settings.base import RoomSettings
from draftmill.settings.train import TrainSettings


def _default(field: str) -> int:
    """The default of training, so that it has one home."""
    return TrainSettings.model_fields[field].default


class EstimateSettings(RoomSettings):
    """What is known of a run before it starts: the target, the drafter's shape, and how many tokens."""

    target: str
    """The model to draft for: a local folder, a Hugging Face id, or package:NAME. Only its config.json is read."""
    input: str | None = None
    """A tokenized set: its card gives the tokens and the mean length. Without it, num_tokens and mean_length do."""
    num_tokens: int = Field(1_866_000_000, ge=1)
    """Tokens of one epoch, prompts included (where no input is given)."""
    mean_length: float = Field(2068.0, ge=2)
    """Mean tokens of a sample (where no input is given)."""
    num_epochs: float = Field(_default("num_epochs"), gt=0)
    """Visits to every sample."""
    num_layers: int = Field(_default("num_layers"), ge=1)
    """Drafter layers."""
    num_taps: int = Field(_default("num_taps"), ge=1)
    """Target layers whose residual streams the drafter reads."""
    tap_ids: tuple[int, ...] = ()
    """The layers read, one by one, instead of num_taps spread evenly."""
    block_size: int = Field(_default("block_size"), ge=2)
    """Tokens per drafted block, the anchor included."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads of a drafter layer; the target's where not given."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key-value heads of a drafter layer; the target's where not given."""
    head_dim: int | None = Field(None, ge=2)
    """Channels of a drafter head; the target's where not given."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of a drafter layer's SwiGLU; the target's where not given."""
    num_anchors: int = Field(_default("num_anchors"), ge=1)
    """Blocks drawn in max_tokens tokens of context at every visit."""
    max_tokens: int = Field(_default("max_tokens"), ge=2)
    """Tokens of context that num_anchors refers to."""
    achieved_tflops: float = Field(100.0, gt=0)
    """Floating-point operations a second that all devices together really achieve, in 10^12."""
