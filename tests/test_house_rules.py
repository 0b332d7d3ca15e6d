"""The CPU half loads neither torch nor transformers; README shows every file; messages name settings as flags."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftmill
from draftmill.rooms import ROOMS

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


# What speaks of a protocol's or a config.json's keys, some of which settings are named after.
SPEAKS_OF_KEYS = {"extract/serve.py", "export/engines.py", "model/shape.py"}
SAYS = {"debug", "info", "warning", "error", "write"}


def said_in(source: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every literal that a file raises, logs or writes, without what is filled in."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAYS
        if is_call or (isinstance(node, ast.Raise) and node.exc is not None):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def test_messages_name_settings_as_the_command_line_does():
    """Who reads `--mask-id` can type it; who has a recipe finds mask_id by it."""
    names = {key for room in ROOMS.values() for key in room.model().model_fields if "_" in key}
    bare = re.compile(rf"(?<![\w.-])({'|'.join(sorted(names))})(?![\w(.])")
    root = Path(draftmill.__file__).parent
    found = [
        f"{file.relative_to(root)}:{line}: {text!r}"
        for file in sorted(root.rglob("*.py"))
        if str(file.relative_to(root)) not in SPEAKS_OF_KEYS
        for line, text in said_in(file)
        if bare.search(text)
    ]
    assert found == []
