"""The CPU half imports in a fresh process without loading torch, transformers, an engine or a tracker."""

import subprocess
import sys

import pytest

CPU_HALF = (
    "cli",
    "line",
    "chat",
    "contracts",
    "estimate",
    "generate",
    "progress",
    "report",
    "serving",
    "settings",
    "storage",
    "tokenize",
)
HEAVY = ("torch", "transformers", "vllm", "sglang", "wandb")
# Every module of a package, so that a file nobody imports yet is held to the rule as well.
PROBE = """
import importlib, pkgutil, sys
found = importlib.import_module("draftmill." + sys.argv[1])
for module in pkgutil.walk_packages(getattr(found, "__path__", ()), found.__name__ + "."):
    importlib.import_module(module.name)
print(*[name for name in sys.argv[2:] if name in sys.modules])
"""


@pytest.mark.parametrize("name", CPU_HALF)
def test_the_cpu_half_loads_nothing_heavy(name: str):
    done = subprocess.run([sys.executable, "-c", PROBE, name, *HEAVY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"draftmill.{name} loads {done.stdout}"
