"""What moves the weights: AdamW, or Muon for the matrices it is meant for; saved and restored bit for bit.

    parameter                               optimizer = "adamw"       optimizer = "muon"
    matrices of the layers                  AdamW, with weight decay  Muon, with weight decay
    every other matrix: fc, a head's        AdamW, with weight decay  AdamW, with weight decay
    gains of norms                          AdamW                     AdamW

Muon (kellerjordan.github.io/posts/muon, as in `torch.optim.Muon`) moves a matrix by its momentum with all directions
made equally long. That suits hidden layers; fc reads residual streams of very different lengths, and stays with AdamW
as embeddings and heads do. An update of Muon is scaled by 0.2 * sqrt(max(rows, columns)), which makes it about as long
as AdamW's (arXiv 2502.16982, section 2.2): one learning rate and one weight decay serve both, unless `muon_lr` is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftmill.settings.train import TrainSettings

# What AdamW keeps of a parameter beside the number of its updates, which the run's position holds.
_ADAMW_KEEPS = ("exp_avg", "exp_avg_sq")
_MUON_KEEPS = ("momentum_buffer",)


@dataclass(frozen=True)
class _Part:
    """One of torch's optimizers, the parameters it moves by name, and what it keeps of each of them."""

    rule: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    keeps: tuple[str, ...]
    lr_ratio: float
    """Its learning rate as a share of AdamW's."""


class Optimizer:
    """Moves every parameter of a drafter by its gradient."""

    def __init__(self, drafter: nn.Module, settings: TrainSettings) -> None:
        named = dict(drafter.named_parameters())
        assert all(p.dtype == torch.float32 for p in named.values()), "master weights are float32"
        is_muon = settings.optimizer == "muon"
        orthogonal = {name: p for name, p in named.items() if is_muon and suits_muon(name, p)}
        rest = {name: p for name, p in named.items() if name not in orthogonal}
        self._parts = [_adamw(rest, settings), *([_muon(orthogonal, settings)] if orthogonal else [])]

    def step(self, lr: float) -> None:
        """Moves the parameters at learning rate `lr` (AdamW's; Muon's is in proportion)."""
        for part in self._parts:
            for group in part.rule.param_groups:
                group["lr"] = lr * part.lr_ratio
            part.rule.step()

    def clear_gradients(self) -> None:
        """Frees the gradients."""
        for part in self._parts:
            part.rule.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Everything kept between steps, on the CPU, by `what.parameter`; empty before the first step."""
        return {
            f"{what}.{name}": part.rule.state[parameter][what].cpu()
            for part in self._parts
            for name, parameter in part.parameters.items()
            for what in part.keeps
            if parameter in part.rule.state
        }

    def sizes(self, num_updates: int) -> dict[str, torch.Size]:
        """The shape of everything that `tensors` gives after so many updates, by the same names."""
        return {
            f"{what}.{name}": parameter.shape
            for part in self._parts
            for name, parameter in part.parameters.items()
            for what in part.keeps
            if num_updates
        }

    def restore(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Takes up what `tensors` gave after `num_updates` steps that moved the weights."""
        if not num_updates:
            return
        for part in self._parts:
            for name, parameter in part.parameters.items():
                kept = {what: tensors[f"{what}.{name}"].to(parameter.device) for what in part.keeps}
                if part.keeps == _ADAMW_KEEPS:
                    kept["step"] = torch.tensor(float(num_updates), device=parameter.device)
                part.rule.state[parameter] = kept


def suits_muon(name: str, parameter: Tensor) -> bool:
    """Whether Muon is meant for this parameter of a drafter: a matrix of one of its layers."""
    return name.startswith("layers.") and parameter.dim() == 2


def _adamw(parameters: dict[str, nn.Parameter], settings: TrainSettings) -> _Part:
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    gains = [p for p in parameters.values() if p.dim() < 2]
    rule = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )
    return _Part(rule, parameters, _ADAMW_KEEPS, lr_ratio=1.0)


def _muon(parameters: dict[str, nn.Parameter], settings: TrainSettings) -> _Part:
    rule = torch.optim.Muon(
        parameters.values(),
        lr=settings.lr,
        momentum=settings.muon_momentum,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return _Part(rule, parameters, _MUON_KEEPS, lr_ratio=(settings.muon_lr or settings.lr) / settings.lr)
