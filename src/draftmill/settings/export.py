"""Settings of `draftmill export`."""

from typing import Literal

from draftmill.settings.base import RoomSettings


class ExportSettings(RoomSettings):
    """A checkpoint in, a folder out that vLLM, SGLang and PyPI dflash load."""

    checkpoint: str
    """The drafter: a training run (its newest checkpoint), one checkpoint's folder, or an exported folder."""
    output: str
    """The local folder to make."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The number format of the weights."""
    layout: Literal["zlab"] = "zlab"
    """The layout of config and tensor names."""
