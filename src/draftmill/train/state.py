"""A run as it stands: drafter, optimizer, position; saved whole after any step and restored bit for bit."""

from dataclasses import dataclass

import msgspec
import torch
from safetensors.torch import load, save

from draftmill.contracts.cards import canonical_json
from draftmill.model.checkpoint import drafter_files
from draftmill.model.drafter import Drafter
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import OPTIMIZER_FILE, POSITION_FILE, WEIGHTS_FILE

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Position(msgspec.Struct, kw_only=True):
    """How far a run has come; everything else about order, anchors and learning rate follows from `step`."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    num_updates: int = 0
    """Steps in which the weights were moved."""
    num_bad: int = 0
    """Steps skipped for a loss or gradient that was not finite."""
    bad_in_a_row: int = 0


@dataclass
class RunState:
    """What training changes."""

    drafter: Drafter
    optimizer: torch.optim.AdamW
    position: Position

    def files(self) -> dict[str, bytes]:
        """The files of a checkpoint, by name."""
        return {
            **drafter_files(self.drafter),
            OPTIMIZER_FILE: save(self._moments(), metadata={"format": "pt"}),
            POSITION_FILE: canonical_json(self.position),
        }

    def restore(self, files: dict[str, bytes]) -> None:
        """Back to where the checkpoint was written."""
        self.drafter.load_state_dict(load(files[WEIGHTS_FILE]))
        self.position = msgspec.json.decode(files[POSITION_FILE], type=Position)
        if self.position.num_updates:
            moments = load(files[OPTIMIZER_FILE])
            for name, parameter in self.drafter.named_parameters():
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.position.num_updates), device=parameter.device),
                    **{m: moments[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS},
                }

    def _moments(self) -> dict[str, torch.Tensor]:
        return {
            f"{moment}.{name}": self.optimizer.state[parameter][moment].cpu()
            for name, parameter in self.drafter.named_parameters()
            for moment in _MOMENTS
            if parameter in self.optimizer.state
        }


def new_run(drafter: Drafter, settings: TrainSettings) -> RunState:
    """A run before its first step: float32 master weights, moments of zero."""
    assert all(p.dtype == torch.float32 for p in drafter.parameters()), "master weights are float32"
    matrices = [p for p in drafter.parameters() if p.dim() >= 2]
    gains = [p for p in drafter.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )
    return RunState(drafter, optimizer, Position())
