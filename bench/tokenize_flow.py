"""What moving bytes adds to tokenizing them: on a slow network, on a fast one, with a second worker, with more shards.

Rows of `tokenize_data.py`, Qwen3.6's tokenizer, `draftmill tokenize` as people call it, in a process of its own; the
object store is SeaweedFS on loopback, behind a proxy that caps the bandwidth each way where that is asked for.
`python bench/tokenize_flow.py [rows] [rounds]`
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import psutil

from draftmill.storage.patience import Patience
from draftmill.storage.store import Store, open_store, sha256_of
from draftmill.storage.transfer import Span, Transfers, together
from draftmill.tokenize.flow import MAX_UPLOADS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from tokenize_data import write

from qwen_folder import write_qwen_tokenizer
from storage.seaweed import BUCKET, environment, seaweed

ROWS, ROUNDS = 20_000, 5
FEW_ROWS = 2_000
STORY_ROWS = 902_087
"""Completions of the run that took 128 workers 6.5 minutes."""
FILES, SHARDS = 24, 40
CAPPED_S = 90
"""How long the capped transfer alone is to take, about: much longer than tokenizing."""
FEW_SHARDS, MANY_SHARDS = 4, 40
GROWTH_BYTES = 64 << 20
LENIENT = ("--max-spike-frac=1", "--max-duplicate-frac=1", "--max-dropped-frac=1")
PROXY = Path(__file__).parents[1] / "tests" / "storage" / "unruly_proxy.py"


class Used(NamedTuple):
    """What one command took."""

    wall_s: float
    cpu_s: float
    """Of the process and all that it started."""
    peak_bytes: int
    """Of all its processes together, shared memory counted once; 0 where nobody looked."""


class Bench:
    """One folder with tokenizer, data and what is measured; each command begins with an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = write_qwen_tokenizer(folder / "tokenizer")
        self._runs = 0

    def tokenize(self, source: str, *flags: str, output: str | None = None, is_watched: bool = False) -> Used:
        """Runs the command; what it took. Its memory only where that `is_watched`, for looking halts the processes."""
        self._runs += 1
        environ = {**os.environ, "DRAFTMILL_CACHE": str(self.folder / f"cache-{self._runs}"), "OMP_NUM_THREADS": "1"}
        words = [f"--input={source}", f"--output={output or self.place()}", f"--tokenizer={self.tokenizer}", *LENIENT]
        before, started = os.times(), time.monotonic()
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "draftmill", "tokenize", *words, *flags], stdout=log, stderr=log, env=environ
            )
            memory = _Memory(process.pid) if is_watched else None
            process.wait()
        wall, after = time.monotonic() - started, os.times()
        assert process.returncode == 0, (self.folder / "log").read_text()[-3000:]
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Used(wall, cpu, memory.stop() if memory else 0)

    def place(self) -> str:
        """Where the last command wrote, unless it was told another place."""
        return str(self.folder / f"out-{self._runs}")


class _Memory:
    """Looks at a process and its descendants now and then."""

    def __init__(self, pid: int) -> None:
        self._process, self._peak, self._ended = psutil.Process(pid), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            with suppress(psutil.Error, ProcessLookupError):
                family = [self._process, *self._process.children(recursive=True)]
                self._peak = max(self._peak, sum(member.memory_full_info().pss for member in family))

    def stop(self) -> int:
        """The largest sum that was seen, in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak


def put_files(url: str, source: Path) -> list[Path]:
    """The rows of one file as FILES objects below `url`; the files they were put from."""
    lines, folder = source.read_bytes().splitlines(keepends=True), source.with_suffix("")
    folder.mkdir(exist_ok=True)
    step = -(-len(lines) // FILES)
    made = []
    for number in range(FILES):
        made.append(folder / f"{number:03}.jsonl")
        made[-1].write_bytes(b"".join(lines[number * step : (number + 1) * step]))
    store = open_store(url)
    for file in made:
        store.put(file.name, file)
    return made


async def _transfer(source: Store, target: Store | None, shards: list[Path], scratch: Path) -> None:
    """All of the input comes while all of the output goes, and nothing is made of it."""
    transfers, slots = Transfers(Patience(60)), asyncio.Semaphore(MAX_UPLOADS)

    async def upload(store: Store, shard: Path) -> None:
        async with slots:
            await transfers.upload(store, shard.name, shard, sha256_of(shard))

    async with together() as tasks:
        for listed in source.files():
            span = Span(source, listed, 0, listed.size)
            tasks.create_task(transfers.download(span, scratch / listed.key))
        for shard in shards if target is not None else []:
            tasks.create_task(upload(target, shard))


def transferred(source: str, target: str | None, shards: list[Path], scratch: Path) -> tuple[float, float]:
    """Seconds of wall and CPU time that moving alone takes, in this process."""
    scratch.mkdir(exist_ok=True)
    wall, cpu = time.monotonic(), time.process_time()
    asyncio.run(_transfer(open_store(source), open_store(target) if target else None, shards, scratch))
    return time.monotonic() - wall, time.process_time() - cpu


@contextmanager
def capped(port: int, bytes_per_s: float) -> Iterator[None]:
    """The store behind a proxy that lets so many bytes a second pass, each way."""
    proxy = subprocess.Popen([sys.executable, str(PROXY), str(port), str(bytes_per_s)], stdout=subprocess.PIPE)
    assert proxy.stdout is not None
    os.environ.update(environment(int(proxy.stdout.readline())))
    try:
        yield
    finally:
        proxy.kill()
        proxy.communicate()
        os.environ.update(environment(port))


def bench_store(bench: Bench, source: Path, port: int) -> dict[str, float]:
    """On a capped network, wall time against the transfer's; uncapped, CPU time against the sum of the parts."""
    os.environ.update(environment(port))
    url = f"s3://{BUCKET}/in"
    files = put_files(url, source)
    num_bytes = sum(file.stat().st_size for file in files)
    flags = (f"--part-bytes={round(1.2 * num_bytes / SHARDS)}", "--workers=2")
    alone = bench.tokenize(str(files[0].parent), *flags)
    shards = sorted(Path(bench.place()).glob("*.arrow"))
    down_cpu = transferred(url, None, [], bench.folder / "scratch")[1]
    both_cpu = transferred(url, f"s3://{BUCKET}/moved", shards, bench.folder / "scratch")[1]
    through = bench.tokenize(url, *flags, output=f"s3://{BUCKET}/out")
    shard_bytes = sum(shard.stat().st_size for shard in shards)
    with capped(port, max(shard_bytes, num_bytes) / CAPPED_S):
        moved_s = transferred(url, f"s3://{BUCKET}/moved-slowly", shards, bench.folder / "scratch")[0]
        slow = bench.tokenize(url, *flags, output=f"s3://{BUCKET}/out-slowly")
    return {
        "megabytes_in": num_bytes / 1e6,
        "megabytes_out": shard_bytes / 1e6,
        "shards": len(shards),
        "capped_transfer_alone_s": moved_s,
        "capped_together_s": slow.wall_s,
        "capped_ratio": slow.wall_s / moved_s,
        "download_cpu_s": down_cpu,
        "upload_cpu_s": both_cpu - down_cpu,
        "tokenize_cpu_s": alone.cpu_s,
        "together_cpu_s": through.cpu_s,
        "cpu_ratio": through.cpu_s / (alone.cpu_s + both_cpu),
    }


def bench_workers(bench: Bench, few: Path, many: Path, rounds: int) -> dict[str, float]:
    """What 2 workers gain over 1 on local input: the rows that `many` has more than `few`, start-up left out.

    Beside it, what 2 processes gain here that share nothing and only make rows: cores that share caches and memory
    give less than 2.
    """
    num_rows = _count(many) - _count(few)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    start_s, cpu_s, limits = [], [], []
    for _ in range(rounds):
        for workers in seconds:
            flags = (f"--part-bytes={max(1, round(1.2 * many.stat().st_size / SHARDS))}", f"--workers={workers}")
            short, long = bench.tokenize(str(few), *flags), bench.tokenize(str(many), *flags)
            seconds[workers].append(long.wall_s - short.wall_s)
            if workers == 2:
                start_s.append(short.wall_s - _count(few) / num_rows * seconds[2][-1])
                cpu_s.append(long.cpu_s - short.cpu_s)
        limits.append(2 * _rows_alone(bench, many, 1) / _rows_alone(bench, many, 2))
    two = median(seconds[2])
    return {
        "rows": num_rows,
        "one_worker_s": median(seconds[1]),
        "two_workers_s": two,
        "workers_ratio": median(one / two for one, two in zip(seconds[1], seconds[2], strict=True)),
        "two_processes_gain_here": median(limits),
        "cpu_ms_a_row": 1e3 * median(cpu_s) / num_rows,
        "start_up_s": median(start_s),
        "story_s": median(start_s) + STORY_ROWS * two / num_rows,
    }


def _rows_alone(bench: Bench, file: Path, processes: int) -> float:
    """Mean CPU-seconds of processes that make rows side by side, without parts or uploads."""
    command = [sys.executable, str(Path(__file__).with_name("tokenize_rows.py")), "--way=ours"]
    command += [f"--folder={bench.tokenizer}", f"--count={_count(file)}"]
    copies = [file.with_name(f"alone-{i}.jsonl") for i in range(processes)]
    for copy in copies:
        copy.write_bytes(file.read_bytes())
    running = [subprocess.Popen([*command, f"--file={copy}"], stdout=subprocess.PIPE) for copy in copies]
    return mean(json.loads(process.communicate()[0].splitlines()[-1])["cpu_s"] for process in running)


def _count(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def write_new_words(file: Path, num_bytes: int) -> Path:
    """Rows whose words nobody has seen before: what a cache of words grows on."""
    rng, number, written = random.Random(0), 0, 0
    with file.open("w") as stream:
        while written < num_bytes:
            words = " ".join(rng.randbytes(6).hex() for _ in range(400))
            messages = [{"role": "user", "content": words[:800]}, {"role": "assistant", "content": words[800:]}]
            written += stream.write(json.dumps({"id": f"new-{number}", "messages": messages}) + "\n")
            number += 1
    return file


def bench_memory(bench: Bench, source: Path, kind: str) -> dict[str, float]:
    """The largest memory of all processes over few shards, and over ten times as many of the same size."""
    part_bytes = round(1.2 * source.stat().st_size / MANY_SHARDS)
    flags = (f"--part-bytes={part_bytes}", "--workers=2", f"--worker-growth-bytes={GROWTH_BYTES}")
    lines = source.read_bytes().splitlines(keepends=True)
    short = source.with_name(f"short-{source.name}")
    short.write_bytes(b"".join(lines[: len(lines) * FEW_SHARDS // MANY_SHARDS]))
    few, many = (bench.tokenize(str(file), *flags, is_watched=True) for file in (short, source))
    return {
        f"{kind}_few_megabytes": few.peak_bytes / 1e6,
        f"{kind}_many_megabytes": many.peak_bytes / 1e6,
        f"{kind}_ratio": many.peak_bytes / few.peak_bytes,
    }


def main() -> None:
    """Prints a table, and one JSON line."""
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as name:
        bench = Bench(Path(name))
        few = write(bench.folder / "few.jsonl", num_rows // 10)
        many = write(bench.folder / "many.jsonl", num_rows + num_rows // 10)
        with seaweed(bench.folder / "seaweed") as port:
            figures: dict[str, Any] = bench_store(bench, many, port)
        figures |= bench_workers(bench, few, many, rounds)
        figures |= bench_memory(bench, many, "memory")
        new = write_new_words(bench.folder / "new.jsonl", many.stat().st_size // 2)
        figures |= bench_memory(bench, new, "memory_of_new_words")
    print(f"{num_rows:,} rows, {rounds} rounds, on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    for key, value in figures.items():
        print(f"  {key.replace('_', ' '):<36} {value:>12,.3f}")
    print(json.dumps({"bench": "tokenize_flow", **figures}))


if __name__ == "__main__":
    main()
