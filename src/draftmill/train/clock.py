"""Time as it is really spent: Python only asks a CUDA device for work, and goes on before it is done."""

import torch


def wait_for(device: torch.device) -> None:
    """Waits until a device has done what it was asked for, so that a clock may be read.

    On CUDA the current stream's work alone: what is on its way to or from other ranks has streams of its own.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
