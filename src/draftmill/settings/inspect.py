"""Settings of `draftmill inspect`."""

import tyro

from draftmill.settings.tokenize import GateSettings


class InspectSettings(GateSettings):
    """Looks at a tokenized set: ours, or any folder that datasets.load_from_disk reads."""

    input: tyro.conf.Positional[str]
    """The set: a folder, local or s3://, with input_ids and loss_mask (or labels)."""
    row: int | None = None
    """Print this sample (from 0), its supervised tokens marked; needs --tokenizer."""
    tokenizer: str | None = None
    """Decodes --row: a local folder, a Hugging Face id, or package:NAME."""
    gate: bool = False
    """Put the gate's question to the set: exit 3 where it would be refused."""
