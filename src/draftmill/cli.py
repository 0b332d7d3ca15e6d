"""`draftmill ROOM …`: reads flags and recipe, calls one room, prints its card. A room is imported only when called.

People read stderr; machines read stdout, whose last line is the card, or `{"error": …}`, as one JSON line.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from types import FrameType, TracebackType
from typing import Any

import msgspec
import tyro
from pydantic import ValidationError

from draftmill import __version__
from draftmill.contracts.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, DraftmillError, RecipeError
from draftmill.rooms import ROOMS
from draftmill.settings.base import RoomSettings, flag
from draftmill.settings.recipes import load_recipe, readable, refuse_unknown, room_values
from draftmill.streams import secure_streams, show_log


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (0 done, 1 failed, 2 usage, 3 refused by a gate, 130 interrupted)."""
    secure_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        return _say(overview()) or (0 if args else EXIT_USAGE)
    if args[0] == "--version":
        return _say(__version__)
    show_log()
    signal.signal(signal.SIGTERM, _interrupt)
    sys.excepthook = _unexpected
    return _guarded(args[0], args[1:])


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: an event loop ends in order then, where an error would come up in whatever task is at work."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:  # a shell has its background jobs ignore Ctrl-C
        raise KeyboardInterrupt


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A fault of ours: the traceback for people, and the JSON line that machines wait for."""
    sys.__excepthook__(kind, error, trace)
    _tell_machines({"error": f"{kind.__name__}: {error}", "exit_code": EXIT_FAILED})


def _guarded(name: str, args: list[str]) -> int:
    try:
        refuse_unknown([name], ROOMS, "draftmill")
        settings = parse(name, args)
        card = ROOMS[name].story()(settings)
    except DraftmillError as error:
        return _failed(name, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed(
            name, "interrupted; what is published stays, run the same command again to go on", EXIT_INTERRUPTED
        )
    return _tell_machines(card)


def _failed(name: str, message: str, exit_code: int) -> int:
    print(f"draftmill {name}: {message}", file=sys.stderr)
    _tell_machines({"error": message, "room": name, "exit_code": exit_code})
    return exit_code


def _tell_machines(line: dict[str, Any]) -> int:
    """Says the last line of stdout; the exit code of that alone."""
    return _say(msgspec.json.encode(line).decode())


def _say(text: str) -> int:
    """Writes to stdout; EXIT_FAILED where that takes nothing. Whoever read it may have left (`| head`): what is done is
    done all the same."""
    try:
        print(text, flush=True)
    except OSError as error:
        # Python flushes once more when it ends, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(
                f"draftmill: the last line is lost ({error.strerror}: stdout); what is published stays", file=sys.stderr
            )
            return EXIT_FAILED
    return 0


def parse(name: str, args: list[str]) -> RoomSettings:
    """The settings of command `name`: defaults < recipe < flags; RecipeError where they cannot be followed."""
    model = ROOMS[name].model()
    path, rest = (None, args) if "recipe" in model.model_fields else _take_recipe(args)
    values = room_values(load_recipe(path), name, model, **_split_flag(rest, model)) if path else {}
    # A list given by flags replaces the recipe's; tyro would append to it.
    values = {k: v for k, v in values.items() if not (isinstance(v, tuple) and _given(k, rest) is not None)}
    required = {k: tyro.MISSING for k, f in model.model_fields.items() if f.is_required()}
    default = model.model_construct(**{**required, **values})
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(
                model,
                args=rest,
                default=default,
                prog=f"draftmill {name}",
                description=ROOMS[name].says
                + ("" if "recipe" in model.model_fields else ". --recipe FILE.toml gives any setting; flags win."),
                config=(tyro.conf.UseAppendAction,),
                console_outputs=True,
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        # tyro exits on what pydantic refuses, too: one readable line says more than its box.
        if isinstance(stop.__context__, ValidationError):
            raise RecipeError(readable(stop.__context__, flag)) from stop
        sys.stderr.write(said.getvalue())
        raise RecipeError(f"the flags cannot be followed (see above, or draftmill {name} --help)") from stop


def _take_recipe(args: list[str]) -> tuple[str | None, list[str]]:
    """The value of `--recipe` (or None) and the arguments without it."""
    for i, arg in enumerate(args):
        if arg == "--recipe":
            if i + 1 == len(args):
                raise RecipeError("--recipe needs a file")
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith("--recipe="):
            return arg.removeprefix("--recipe="), args[:i] + args[i + 1 :]
    return None, args


def _split_flag(args: list[str], model: type[RoomSettings]) -> dict[str, Any]:
    """`--split` as given by a flag: a recipe derives the place of the output from it."""
    split = _given("split", args) if "split" in model.model_fields else None
    return {} if split is None else {"split": split}


def _given(key: str, args: list[str]) -> str | None:
    """The value that flags give to a setting (`--key V` or `--key=V`, with - or _), None where they give none."""
    for arg, following in zip(args, [*args, ""][1:], strict=True):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == key:
            return value if equals else following
    return None


def overview() -> str:
    """What `draftmill --help` prints."""
    rooms = "\n".join(f"  {name:<10}{room.says}" for name, room in ROOMS.items())
    return (
        "draftmill trains DFlash drafters: small models that let a serving engine emit several tokens per pass of a\n"
        "large target model. It is one line: prompts -> generate -> tokenize -> train -> evaluate -> export.\n\n"
        f"usage: draftmill ROOM [--recipe FILE.toml] [flags]\n\n{rooms}\n\n"
        "draftmill ROOM --help shows a room's flags; draftmill run --recipe recipes/demo.toml runs the whole line."
    )


if __name__ == "__main__":
    sys.exit(main())
