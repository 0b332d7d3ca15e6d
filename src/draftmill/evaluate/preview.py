"""What `draftmill evaluate --dry-run` shows."""

import sys
from typing import Any

import msgspec

from draftmill.contracts.cards import Plan
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.storage.sets import missing_parts


def preview(settings: EvaluateSettings, plan: Plan) -> dict[str, Any]:
    """Recipe, inputs, outputs and the parts left to make, also on stderr; writes nothing."""
    told = {
        "room": "evaluate",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": msgspec.to_builtins(plan.inputs),
        "outputs": list(settings.output),
        "left": [part.name for part in missing_parts(settings.output, plan)],
    }
    size = sum(file.size for file in plan.inputs)
    prompts = sum(len(part.inputs) for part in plan.parts)
    sys.stderr.write(
        f"evaluate reads {len(plan.inputs)} files ({size:,} bytes) with {prompts} prompts; "
        f"{len(told['left'])} of {len(plan.parts)} parts are left to make in {', '.join(settings.output)}\n"
    )
    return told
