"""Who made a set, when and with what: the `run` half of a card, never hashed."""

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "draftmill",
    "torch",
    "transformers",
    "tokenizers",
    "pyarrow",
    "safetensors",
    "obstore",
    "msgspec",
    "jinja2",
    "gigatoken",
)


@dataclass(frozen=True)
class Stopwatch:
    """Wall and CPU time (this process and its finished children) since it was made."""

    wall: float = field(default_factory=time.monotonic)
    cpu: float = field(default_factory=lambda: _cpu_s())

    def wall_s(self) -> float:
        """Seconds of wall time since the start."""
        return time.monotonic() - self.wall

    def cpu_s(self) -> float:
        """CPU seconds since the start."""
        return _cpu_s() - self.cpu


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def provenance(watch: Stopwatch) -> dict[str, Any]:
    """Command, versions, commit, host and times of this run."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "host": platform.node(),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(watch.wall_s(), 1),
        "cpu_seconds": round(watch.cpu_s(), 1),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the checkout this code runs from (`+dirty` where it was changed), None outside a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    asked = subprocess.run(["git", "describe", "--always", "--dirty=+dirty"], cwd=root, capture_output=True, text=True)
    return asked.stdout.strip() or None
