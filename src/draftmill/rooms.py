"""The commands of draftmill: where each one's settings and story live. A room is imported only when it is called."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftmill.contracts.errors import DraftmillError
from draftmill.settings.base import RoomSettings

TRAIN_EXTRA = ("torch", "transformers", "safetensors", "gguf")


@dataclass(frozen=True)
class Room:
    """One command: `module:name` of its settings and of its `run`, and what it does in one line."""

    settings: str
    run: str
    says: str

    def model(self) -> type[RoomSettings]:
        """The room's settings model."""
        return _load(f"draftmill.settings.{self.settings}")

    def story(self) -> Callable[[Any], dict[str, Any]]:
        """The room's `run(settings) -> card`; DraftmillError where this host lacks what the room needs."""
        try:
            return _load(f"draftmill.{self.run}")
        except ModuleNotFoundError as error:
            if error.name not in TRAIN_EXTRA:
                raise
            raise DraftmillError(
                f"{error.name} is not installed on this host, and this room needs it: pip install 'draftmill[train]'"
            ) from error


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


ROOMS = {
    "run": Room("run:RunSettings", "line:run", "the whole line from one recipe: prompts in, measured drafter out"),
    "generate": Room("generate:GenerateSettings", "generate.run:run", "prompts -> the target's own answers"),
    "tokenize": Room("tokenize:TokenizeSettings", "tokenize.run:run", "answers -> token ids and loss masks (no torch)"),
    "train": Room("train:TrainSettings", "train.run:run", "token ids + frozen target -> drafter checkpoints"),
    "evaluate": Room("evaluate:EvaluateSettings", "evaluate.run:run", "drafter + target -> lossless acceptance length"),
    "export": Room("export:ExportSettings", "export.run:run", "checkpoint -> a folder vLLM and SGLang load"),
    "estimate": Room("estimate:EstimateSettings", "estimate.run:run", "what a training run will cost, before it runs"),
    "report": Room("report:ReportSettings", "report.run:run", "one HTML page of what happened"),
    "inspect": Room("inspect:InspectSettings", "tokenize.inspect:run", "look at a tokenized set, put the gate to it"),
}
