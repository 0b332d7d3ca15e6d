"""What `draftmill evaluate --dry-run` shows."""

import sys
from typing import Any

import msgspec

from draftmill.contracts.cards import Plan
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.storage.sets import look_at


def preview(settings: EvaluateSettings, plan: Plan) -> dict[str, Any]:
    """Recipe, inputs, outputs and the parts left to make, also on stderr; writes nothing."""
    standing = look_at(settings.output, plan)
    told = {
        "room": "evaluate",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": msgspec.to_builtins(plan.inputs),
        "outputs": list(settings.output),
        "left": [part.name for part in standing.left],
        "done": standing.is_done,
    }
    size = sum(file.size for file in plan.inputs)
    prompts = sum(len(part.inputs) for part in plan.parts)
    sys.stderr.write(
        f"evaluate reads {len(plan.inputs)} files ({size:,} bytes) with {prompts} prompts; "
        f"{', '.join(settings.output)}: {standing.words}\n"
    )
    return told
