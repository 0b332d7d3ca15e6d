"""`python -m draftmill.extract.convert SOURCE.gguf FOLDER`: a GGUF file becomes an ordinary Hugging Face folder.

Weights are written in float32, although bfloat16 would be half the size: a dequantised weight is scale * integer, which
float32 holds without a rounding of its own. Target, drafter training and evaluation then all read the very numbers
that the GGUF file means, whatever dtype they compute in, and two conversions give the same bytes.

The folder appears whole or not at all: it is written beside its place, under a lock that the system drops with the
process, and renamed last. A second process waits for the first and finds the folder ready.
"""

import fcntl
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from draftmill.streams import show_log

logger = logging.getLogger(__name__)


def make_once(source: Path, folder: Path, convert: Callable[[Path, Path], None]) -> None:
    """Has `convert` write `folder` from `source`, whole or not at all, unless it is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return
        logger.info("converting %s to %s (once, about half a minute)", source.name, folder)
        draft = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)  # what a killed conversion left
        convert(source, draft)
        draft.rename(folder)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes the weights (float32), config, tokenizer and chat template of a GGUF file as a Hugging Face folder."""
    place, name = str(source.parent), source.name
    # Without dequantize=True transformers keeps the weights packed and refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    show_log()
    disable_progress_bar()
    make_once(Path(sys.argv[1]), Path(sys.argv[2]), convert_gguf)
