"""Settings of `draftmill train`."""

from typing import Literal

from pydantic import Field, model_validator

from draftmill.settings.base import RoomSettings, refuse_gpus_of_a_cpu
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.settings.workers import MOST_THREADS

# DFlash (arXiv 2602.06036) gives a decay for these block sizes; any other must be chosen.
GAMMA_OF_BLOCK = {16: 7.0, 10: 5.0, 8: 4.0}

# Larger numbers are slips: they would be found out by memory that is full, or by a library that cannot count so far.
_MOST_LAYERS, _MOST_TOKENS, _MOST_CHANNELS, _MOST_PROCESSES = 1 << 12, 1 << 30, 1 << 20, 1 << 16
MOST_STEPS = 10**8 - 1  # the eight digits of a checkpoint's folder
_LARGEST_SEED = (1 << 63) - 1
_MOST_SLOTS, _MOST_ROWS = 1 << 12, 1 << 16

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class TrainSettings(RoomSettings):
    """From a tokenized set and a frozen target to checkpoints of a drafter."""

    input: str
    """The tokenized set: the output of draftmill tokenize, which may still be at work on it."""
    output: tuple[str, ...] = Field(min_length=1)
    """Folders (local or s3://) that receive checkpoints, metrics.jsonl and the card; may be given twice."""
    target: str
    """The frozen model to draft for: a local folder, a Hugging Face id, or package:NAME."""

    num_layers: int = Field(5, ge=1, le=_MOST_LAYERS)
    """Drafter layers."""
    num_taps: int = Field(5, ge=1, le=_MOST_LAYERS)
    """Target layers read, spread evenly; tap_ids names them one by one instead."""
    tap_ids: tuple[int, ...] = ()
    """0-based target layers whose outputs are read, ascending; empty: num_taps of them, spread evenly."""
    block_size: int = Field(16, ge=2, le=_MOST_SLOTS)
    """Tokens per drafted block, the known anchor included."""
    mask_id: int | None = Field(None, ge=0, le=_MOST_TOKENS)
    """The token that stands for a slot to be drafted; none: the first embedding row that the tokenizer leaves, or where
    it names them all, the first that the data leave (which an unfinished set cannot tell)."""
    num_heads: int | None = Field(None, ge=1, le=_MOST_CHANNELS)
    """Query heads of the drafter; none: the target's, where its head_dim is at most 128."""
    num_kv_heads: int | None = Field(None, ge=1, le=_MOST_CHANNELS)
    """Key-value heads of the drafter; none: the target's."""
    head_dim: int | None = Field(None, ge=2, le=_MOST_CHANNELS)
    """Channels per head of the drafter; none: the target's, where at most 128."""
    intermediate_size: int | None = Field(None, ge=1, le=_MOST_CHANNELS)
    """Width of the drafter's feed-forward layers; none: the target's."""
    num_sliding_layers: int = Field(0, ge=0, le=_MOST_LAYERS)
    """The first so many drafter layers see a window only, and are causal inside the block."""
    sliding_window: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    """Tokens a sliding layer looks back, itself included; needed with num_sliding_layers."""
    init: str = "random"
    """Where the drafter starts: random; target: layers copied from the target (shapes must agree); or a drafter to go
    on from: a folder in the z-lab layout, or a run's, of this very shape."""

    num_anchors: int = Field(512, ge=1, le=_MOST_TOKENS)
    """Blocks per max_tokens of text; a shorter sample gets its share, rounded up."""
    max_tokens: int = Field(3072, ge=2, le=_MOST_TOKENS)
    """Tokens a training row may hold; short samples of a part share a row, longer ones are cut there (and at the end of
    the target's window, where that comes first) and counted."""
    rows_per_step: int = Field(1, ge=1, le=_MOST_ROWS)
    """Training rows that make one optimizer step (one mean over all their slots); each is a micro-batch."""
    draws_per_pass: int = Field(1, ge=1, le=_MOST_ROWS)
    """Steps that reuse one pass of the target over their rows, each with anchors of its own."""
    num_epochs: int = Field(6, ge=1, le=MOST_STEPS)
    """Passes over the set, with fresh anchors each (draws_per_pass times as many); num_steps overrules it."""
    num_steps: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Optimizer steps, however many passes that takes; needed where the set is unfinished and its length not known."""
    seed: int = Field(0, ge=0, le=_LARGEST_SEED)
    """Of the initial weights, the order of samples, and the anchors."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """What moves the weights; muon: the matrices of the layers by Muon, all others by AdamW. Muon computes in bfloat16,
    which CPUs without instructions for it (avx512_bf16, amx) do 20 times slower than float32."""
    lr: float = Field(6e-4, gt=0)
    """Peak learning rate of AdamW, and of Muon unless muon_lr is set."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, on matrices only."""
    muon_lr: float | None = Field(None, gt=0)
    """Peak learning rate of Muon; none: lr, as its updates are scaled to the length of AdamW's. Follows the same
    schedule."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's momentum (Nesterov's)."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients longer than this are shortened to it."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay per update of an average of the weights (0.999 is usual), which is then what checkpoints publish, for
    evaluate and export; none: no average."""
    warmup_frac: float = Field(0.04, ge=0, le=1)
    """Share of the steps over which the learning rate rises."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: a cosine down to final_lr_frac, or constant with a linear end (warm-up, stable, decay)."""
    decay_frac: float = Field(0.2, gt=0, le=1)
    """Share of the steps over which wsd falls."""
    final_lr_frac: float = Field(0.0, ge=0, le=1)
    """What is left of the peak learning rate at the end."""
    loss: Literal["d-pace", "decay", "uniform"] = "d-pace"
    """How the slots of a block are weighted."""
    gamma: float | None = Field(None, gt=0)
    """Decay of the slot weights, in slots; none: 7, 5, 4 for blocks of 16, 10, 8, and any other must be set."""
    alpha: float = Field(0.5, gt=0, le=1)
    """d-pace's floor under the label probabilities."""
    labels: Literal["text", "target"] = "text"
    """The right token of a slot: the text's own, or the one the target itself finds most likely there."""
    hard_weight: float = Field(1.0, ge=0)
    """Weight of a slot's cross-entropy with its label."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of a slot's KL divergence from the target's distribution (costs the target's last layers)."""
    tv_weight: float = Field(0.0, ge=0)
    """Weight of a slot's total variation from the target's distribution: 1 - its chance of acceptance when sampling."""
    feature_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on the features in training, as a share of a sample's root mean square."""
    loss_vocab: Literal["all", "seen"] = "all"
    """Tokens the loss chooses among: the target's whole vocabulary, or those that occur in the set (an easier loss, for
    narrow text where the head dominates the cost of a step; drafting always chooses among all)."""

    attention: Literal["auto", "dense", "grouped", "flex"] = "auto"
    """Form of attention; auto: flex on CUDA, grouped elsewhere. All follow one rule."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What target and drafter compute in; weights, moments and loss stay float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a CUDA device where there is one."""
    placement: Literal["shared", "split"] = "shared"
    """shared: every rank (process) holds target and drafter; split: target ranks read what drafter ranks learn from."""
    ranks: int | None = Field(None, ge=1, le=_MOST_PROCESSES)
    """Ranks of placement shared, started on this host; none: those that torchrun started, or one. Rows of a step are
    dealt to them in turn, so rows_per_step should be a multiple."""
    target_ranks: int = Field(1, ge=1, le=_MOST_PROCESSES)
    """Ranks that hold the target in placement split."""
    drafter_ranks: int = Field(1, ge=1, le=_MOST_PROCESSES)
    """Ranks that hold the drafter in placement split; rows_per_step should be a multiple of them."""
    target_gpus: int = Field(1, ge=1, le=_MOST_PROCESSES)
    """CUDA devices that the target of each rank is spread over, layer by layer; the first is the rank's own."""
    in_flight_bytes: int = Field(1 << 30, ge=1)
    """Hidden states that a rank may have on their way in placement split; one row's at least. On the CPU what was taken
    counts until room is needed, for gloo does not tell of it before."""
    rank_timeout_s: float = Field(1800, gt=0)
    """How long a rank waits for another that lives and says nothing; one that ended is noticed at once."""
    threads: int = Field(1, ge=1, le=MOST_THREADS)
    """CPU threads of each rank; runs are equal bit for bit at the same number only."""
    target_packing: Literal["auto", "off"] = "off"
    """Lay the documents that the target reads together end to end in one row, without padding; auto: where a
    measurement at the start shows that it reads each as it does alone (targets with linear attention never do)."""
    feature_cache_bytes: int = Field(0, ge=0)
    """Memory for target features of samples that will be visited again; 0: recompute them at every visit."""

    save_every: int = Field(500, ge=1, le=MOST_STEPS)
    """Steps between checkpoints; the first (step 0) and the last are always kept."""
    keep_checkpoints: int = Field(3, ge=1, le=MOST_STEPS)
    """How many of the newest checkpoints stay, beside step 0."""
    store_patience_s: float = Field(600, ge=0)
    """How long an object store that does not answer is waited for. When a checkpoint is written training goes on
    meanwhile, until the next one is due."""
    stall_timeout_s: float = Field(1200, gt=0)
    """How long the next part of an unfinished set is waited for while no other part of it appears either; must be less
    than rank_timeout_s where there are several ranks."""
    data_cache_bytes: int = Field(64 << 30, ge=1)
    """Local disk for parts fetched from an object store, which ranks of a host share and each accounts for itself; the
    whole set must fit where it is read more than once."""
    eval_every: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Steps between measurements of the acceptance length on eval_input, a multiple of save_every (and at the last
    step); none: no measurement while training. They change no weight."""
    eval_input: tuple[str, ...] = ()
    """Held-out prompts: completions sets of this target, made greedily, or prompt files, which are only decoded. May be
    given more than once."""
    eval_decode_prompts: int = Field(8, ge=0)
    """Held-out prompts that are really decoded each time; chosen by a hash, spread evenly over the families."""
    eval_walk_prompts: int = Field(32, ge=0)
    """Held-out answers walked each time: far cheaper than decoding."""
    eval_max_new_tokens: int = Field(EvaluateSettings.model_fields["max_new_tokens"].default, ge=2, le=_MOST_TOKENS)
    """Tokens of a held-out answer that count."""
    trackers: tuple[TrackerName, ...] = ()
    """Who draws the figures of metrics.jsonl too, where installed: tensorboard, wandb, trackio; may be several."""
    tracker_project: str = "draftmill"
    """The project that the run belongs to at W&B and Trackio."""
    max_dropped_frac: float = Field(0.1, ge=0, le=1)
    """The gate refuses a set of which more than this share must be dropped."""
    min_agreement: float = Field(0.1, ge=0, le=1)
    """The gate refuses a set of whose answer tokens the target itself finds fewer than this share most likely."""
    max_poisoned: int = Field(10, ge=0)
    """Samples with hidden states that are not finite (nothing is learnt from them, the card lists them) before training
    stops."""
    max_bad_steps: int = Field(5, ge=0)
    """Steps in a row with a loss or gradient that is not finite (each is skipped and counted) before training stops."""

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainSettings":
        if self.loss == "decay" and self.gamma is None and self.block_size not in GAMMA_OF_BLOCK:
            known = ", ".join(map(str, sorted(GAMMA_OF_BLOCK)))
            raise ValueError(f"--gamma must be set for --block-size {self.block_size}: it is known for {known} only")
        if self.num_sliding_layers > self.num_layers:
            raise ValueError(f"--num-sliding-layers {self.num_sliding_layers} of --num-layers {self.num_layers}")
        if (self.num_sliding_layers > 0) != (self.sliding_window is not None):
            raise ValueError("--sliding-window and --num-sliding-layers go together: set both, or neither")
        self._refuse_ranks_of_another_placement()
        refuse_gpus_of_a_cpu(self.device, self.target_gpus)
        if self.muon_lr is not None and self.optimizer != "muon":
            raise ValueError(f"--muon-lr {self.muon_lr:g} goes with --optimizer muon; this run has {self.optimizer}")
        if self.eval_every is not None:
            self._refuse_evaluation_of_nothing(self.eval_every)
        if self.hard_weight + self.kl_weight + self.tv_weight == 0:
            raise ValueError("--hard-weight, --kl-weight and --tv-weight are all 0: nothing would be learnt")
        return self

    def _refuse_ranks_of_another_placement(self) -> None:
        if self.placement == "split" and self.ranks is not None:
            raise ValueError(
                "--ranks belongs to --placement shared; --placement split has --target-ranks and --drafter-ranks"
            )
        if self.placement == "shared" and (self.target_ranks, self.drafter_ranks) != (1, 1):
            raise ValueError(
                "--target-ranks and --drafter-ranks belong to --placement split; --placement shared has --ranks"
            )

    def _refuse_evaluation_of_nothing(self, every: int) -> None:
        if not self.eval_input:
            raise ValueError("--eval-every needs --eval-input: held-out prompts to measure on")
        if every % self.save_every:
            raise ValueError(
                f"--eval-every {every} is not a multiple of --save-every {self.save_every}: what is measured belongs "
                "to weights that are saved"
            )
        if not self.eval_decode_prompts + self.eval_walk_prompts:
            raise ValueError("--eval-decode-prompts and --eval-walk-prompts are both 0: nothing would be measured")

    @property
    def needs_last_state(self) -> bool:
        """Whether the loss asks for the target's own distribution."""
        return self.labels == "target" or self.kl_weight > 0 or self.tv_weight > 0

    @property
    def resolved_gamma(self) -> float:
        """gamma, from the block size where it is not set; 1 where the loss does not use it."""
        return self.gamma or GAMMA_OF_BLOCK.get(self.block_size, 1.0)
