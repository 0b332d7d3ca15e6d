"""Starts the ranks of a run on this host, and sees to it that they end together.

Ranks are forked from a server process that has loaded torch once and done nothing else, and find the same environment
that torchrun gives (RANK, WORLD_SIZE, a store at MASTER_ADDR), so that several hosts by torchrun are the same to them.
When one ends badly the others are asked to end, then ended; the first to fall is the one that is named. Ranks whose
launcher is gone, however it went, end as if it had asked them.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from draftmill.contracts.errors import EXIT_FAILED, EXIT_INTERRUPTED, DraftmillError
from draftmill.settings.train import TrainSettings
from draftmill.storage.local import write_atomically
from draftmill.streams import secure_streams, show_log
from draftmill.train.layout import Layout
from draftmill.train.ranks import RankLostError

log = logging.getLogger(__name__)

METHOD = "forkserver"
# What every rank would import for itself when it loads its target: 5 CPU-seconds each.
PRELOADED = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils")
HOST = "127.0.0.1"
# A rank 0 that is asked to end may be writing a checkpoint (30 s are torch's own limit where another rank has failed).
# The others keep nothing. One that hangs is ended earlier: rank 0 may be waiting for it inside gloo, and notices then.
LAST_WORDS_S, LAST_STEP_S = 45.0, 20.0
_SIGNALLED = (-signal.SIGTERM, -signal.SIGINT)

Story = Callable[[TrainSettings], dict[str, Any]]


class RankFailedError(DraftmillError):
    """One of the ranks ended badly; exits as that rank would have by itself."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Call:
    """What every rank is started with."""

    story: Story
    settings: TrainSettings
    layout: Layout
    environment: dict[str, str]
    outcomes: Path


class _Outcome(msgspec.Struct):
    """How a rank ended, where it could say so."""

    card: dict[str, Any] | None = None
    error: str = ""
    exit_code: int = 0
    is_lost: bool = False
    """Whether it only ended because another one had."""


def start_ranks(story: Story, settings: TrainSettings, layout: Layout) -> dict[str, Any]:
    """Runs `story` in every rank of the layout; rank 0's card. RankFailedError naming the rank that failed first."""
    log.info("starting %d ranks on this host", layout.world)
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    multiprocessing.get_context(METHOD).set_forkserver_preload([story.__module__, *PRELOADED])
    with TemporaryDirectory(prefix="draftmill-ranks-") as outcomes:
        call = _Call(story, settings, layout, _environment(layout, server.port), Path(outcomes))
        context = start_processes(_be_rank, (call,), layout.world, join=False, start_method=METHOD)
        assert context is not None
        processes: list[BaseProcess] = context.processes  # pyright: ignore[reportAssignmentType]
        try:
            _wait(context)
        except ProcessException as error:
            ended = [process.exitcode or 0 for process in processes]
            raise _culprit(call, ended, error.error_index) from error
        except BaseException:
            _end(processes)
            raise
        card = _outcome(call, 0).card
    assert card is not None, "rank 0 ended well"
    return card


def _environment(layout: Layout, port: int) -> dict[str, str]:
    """What torchrun would set, over all that this process has: the server's own environment may be older."""
    loopback = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
    return {
        **os.environ,
        **loopback,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(layout.world),
        "LOCAL_WORLD_SIZE": str(layout.world),
        # The store is this process's, and outlives any rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _wait(context: ProcessContext) -> None:
    while not context.join():
        pass


def _end(processes: Sequence[BaseProcess]) -> None:
    """Asks the ranks to end, and ends those that do not; rank 0 last."""
    asked = time.monotonic()
    for process in processes:
        process.terminate()
    writer, *others = processes
    for process in others:
        _see_off(process, asked + LAST_STEP_S)
    _see_off(writer, asked + LAST_WORDS_S)


def _see_off(process: BaseProcess, until: float) -> None:
    """Waits until the process has ended, and ends it then."""
    process.join(max(0.0, until - time.monotonic()))
    process.kill()
    process.join()


def _culprit(call: _Call, ended: Sequence[int], first: int) -> RankFailedError:
    """The rank that ended of its own account: killed from outside, or failed while all others were there.

    `first` is the one whose end was noticed first, which may be one that had merely lost another.
    """
    lost = [_outcome(call, rank).is_lost for rank in range(len(ended))]
    failed = [rank for rank, code in enumerate(ended) if code > 0 and not lost[rank]]
    # Those that do not heed SIGTERM are killed in the end: only where nobody failed did a kill come from outside.
    killed = [rank for rank, code in enumerate(ended) if code < 0 and code not in _SIGNALLED]
    rank = first if not lost[first] else next(iter([*failed, *killed]), first)
    name, outcome = call.layout.name(rank), _outcome(call, rank)
    if outcome.error:
        return RankFailedError(f"{name}: {outcome.error}", outcome.exit_code)
    code = ended[rank]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} (see above)"
    return RankFailedError(
        f"{name} {how}, and the others were ended with it; what is published stays, run the same command again to go on"
    )


def _outcome(call: _Call, rank: int) -> _Outcome:
    with suppress(FileNotFoundError):
        return msgspec.json.decode((call.outcomes / str(rank)).read_bytes(), type=_Outcome)
    return _Outcome()


def _outlive_no_launcher() -> None:
    """Waits until the launcher is gone, killed perhaps; asks this rank to end, and ends it where it does not."""
    # A pipe whose other end only the launcher holds. This process's parent is the fork server, which lives on with us.
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "ranks are started by multiprocessing"
    launcher.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_WORDS_S)
    os._exit(EXIT_FAILED)


def _be_rank(rank: int, call: _Call) -> None:
    """One rank, from start to end, in a process of its own."""
    secure_streams()
    show_log()
    os.environ.update(call.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # Until there is something to keep, a rank that is asked to end does so at once, whatever it waits for.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_outlive_no_launcher, daemon=True).start()
    try:
        outcome = _Outcome(card=call.story(call.settings))
    except DraftmillError as error:
        outcome = _Outcome(error=str(error), exit_code=error.exit_code, is_lost=isinstance(error, RankLostError))
    except KeyboardInterrupt:
        outcome = _Outcome(error="interrupted", exit_code=EXIT_INTERRUPTED, is_lost=True)
    except Exception:
        traceback.print_exc()
        raise
    # Whole or not at all: it may be ended, and what it said read, at any moment.
    write_atomically(call.outcomes / str(rank), msgspec.json.encode(outcome))
    sys.stderr.flush()
    if outcome.exit_code:
        # Not sys.exit: what torch keeps for ranks that are gone would be waited for.
        os._exit(outcome.exit_code)
