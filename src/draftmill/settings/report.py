"""Settings of `draftmill report`."""

from draftmill.settings.base import RoomSettings


class ReportSettings(RoomSettings):
    """A run's folder in, one self-contained HTML page out."""

    input: str
    """The run: the folder (local or s3://) below which the rooms wrote their sets."""
    output: str
    """The HTML file to write, local or s3://."""
