"""What `draftmill tokenize --dry-run` shows."""

import sys
from typing import Any

import msgspec

from draftmill.storage.sets import Standing, look_at
from draftmill.tokenize.closing import beside
from draftmill.tokenize.ledger import unmade
from draftmill.tokenize.plan import Blueprint


def preview(blueprint: Blueprint) -> dict[str, Any]:
    """Recipe, inputs, outputs and the parts left to make, also on stderr; writes nothing."""
    settings, files, plan = blueprint.settings, blueprint.source.files, blueprint.plan
    standing = look_at(settings.output, plan, *beside(plan))
    ours = [part.name for number, part in enumerate(plan.parts) if settings.makes(number)]
    open_parts = _open_parts(standing, is_shared=settings.shard is not None)
    left = [name for name in ours if name in open_parts]
    shard = f" of shard {settings.shard}" if settings.shard else ""
    state = "done" if standing.is_done else f"{len(left):,} of {len(ours):,} parts{shard} are left to make"
    sys.stderr.write(
        f"tokenize reads {len(files):,} files ({sum(f.size for f in files):,} bytes) of {blueprint.source.store.url} "
        f"with the tokenizer in {blueprint.rows.tokenizer}, {settings.workers} parts at a time; "
        f"{', '.join(settings.output)}: {state}\n"
    )
    return {
        "room": "tokenize",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": msgspec.to_builtins(files),
        "outputs": list(settings.output),
        "left": left,
        "done": standing.is_done,
    }


def _open_parts(standing: Standing, *, is_shared: bool) -> set[str]:
    """Parts that some output lacks still; where several runs share the work, those that nobody has made."""
    if is_shared and standing.writer is not None:
        return set(unmade(standing.left, standing.writer.sizes()))
    return {part.name for part in standing.left}
