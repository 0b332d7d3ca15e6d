"""The CPU half loads neither torch nor transformers, in a fresh process; README shows every file."""

import subprocess
import sys
from pathlib import Path

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
    "streams",
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


def test_the_tree_in_the_readme_names_every_file():
    root = Path(__file__).parents[1]
    tree = (root / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    files = [*(root / "src" / "draftmill").rglob("*.py"), *(root / "bench").glob("*.py"), *(root / "recipes").iterdir()]
    own_settings = root / "src" / "draftmill" / "settings"
    names = {f.name for f in files if f.parent != own_settings and not f.name.startswith("__")}
    assert [name for name in sorted(names) if name not in tree] == []
