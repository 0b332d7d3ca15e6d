"""How soon training begins on a set that is still being made: from an empty start to the first optimizer step.

Rows of `tokenize_data.py` come from SeaweedFS on loopback at a capped rate (as from a network, so that `draftmill
tokenize` takes minutes while both cores stay free), a byte-level tokenizer, a tiny random target. `draftmill train`
starts as soon as there is a plan. Refused where a tenth of the shards is there before the first step.
`python bench/streaming.py [rows, a multiple of 60] [seconds that the input takes to arrive]`
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from tokenize_data import rows

from draftmill.storage.store import Store, open_store
from storage.seaweed import BUCKET, environment, seaweed
from storage.unruly_proxy import UnrulyProxy
from tiny import write_tiny_target

ROWS, ARRIVAL_S = 960, 240
NUM_SHARDS = 60
# As tokenize foretells it.
SHARD_BYTES_PER_INPUT_BYTE = 1.25
MOST_FRAC = 0.1
TOKENIZE = ("--workers=1", "--max-spike-frac=1", "--max-duplicate-frac=1", "--max-dropped-frac=1")
TRAIN = (
    *("--num-steps=20", "--num-layers=1", "--num-taps=1", "--block-size=4", "--max-tokens=512", "--num-anchors=16"),
    *("--save-every=20", "--min-agreement=0"),
)


def put_plain(place: Store, num_rows: int) -> int:
    """Puts the rows into files, without the reasoning that the tiny target's template does not print; their bytes."""
    size, made = 0, rows(num_rows)
    for i in range(NUM_SHARDS):
        batch = list(islice(made, num_rows // NUM_SHARDS))
        for message in (message for row in batch for message in row["messages"]):
            message.pop("reasoning_content", None)
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in batch).encode()
        place.put(f"rows-{i:03}.jsonl", data)
        size += len(data)
    return size


def started(room: str, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """The command, in a process of its own."""
    with log.open("wb") as stream:
        return subprocess.Popen([sys.executable, "-m", "draftmill", room, *flags], stdout=stream, stderr=stream)


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the file holds something; the process's own words where it ends before."""
    while not (path.is_file() and path.stat().st_size):
        if process.poll() is not None:
            sys.exit(f"the command ended before {path.name} was there:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def measure(folder: Path, source: str, part_bytes: int) -> dict[str, float]:
    """Seconds and shards at the plan and at the first step."""
    target, samples = write_tiny_target(folder / "target"), folder / "samples"
    start = time.monotonic()
    flags = (f"--input={source}", f"--output={samples}", f"--tokenizer={target}", f"--part-bytes={part_bytes}")
    making = started("tokenize", folder / "tokenize.log", *flags, *TOKENIZE)
    try:
        wait_for(samples / "plan.json", making, folder / "tokenize.log")
        planned_s = time.monotonic() - start
        flags = (f"--input={samples}", f"--output={folder / 'run'}", f"--target={target}")
        training = started("train", folder / "train.log", *flags, *TRAIN)
        wait_for(folder / "run" / "metrics.jsonl", training, folder / "train.log")
        stepped_s, shards = time.monotonic() - start, len(list(samples.glob("part-*.json")))
        training.wait()
    finally:
        making.terminate()
        making.wait()
    total = len(json.loads((samples / "plan.json").read_bytes())["parts"])
    return {"plan_s": planned_s, "first_step_s": stepped_s, "shards_at_first_step": shards, "shards": total}


def main(num_rows: int, arrival_s: float) -> None:
    """One measurement, as a table and as a line of JSON."""
    with tempfile.TemporaryDirectory() as name, seaweed(Path(name) / "weed") as port:
        folder = Path(name)
        os.environ |= {**environment(port), "DRAFTMILL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        size = put_plain(open_store(f"s3://{BUCKET}/bench"), num_rows)
        with UnrulyProxy(port, bytes_per_s=size / arrival_s) as proxy:
            os.environ |= environment(proxy.port)
            found = measure(folder, f"s3://{BUCKET}/bench", int(SHARD_BYTES_PER_INPUT_BYTE * size / NUM_SHARDS))
    frac = found["shards_at_first_step"] / found["shards"]
    print(f"{num_rows:,} rows, {size:,} bytes, arriving in {arrival_s:g} s; {found['shards']} shards")
    print(f"  the plan is there after       {found['plan_s']:6.1f} s")
    print(f"  the first optimizer step after {found['first_step_s']:5.1f} s, with {frac:.1%} of the shards")
    print(json.dumps({"bench": "streaming", "rows": num_rows, "arrival_s": arrival_s, **found}))
    if frac >= MOST_FRAC:
        sys.exit(f"{frac:.1%} of the shards were there before the first step: {MOST_FRAC:.0%} are the most")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS, float(sys.argv[2]) if len(sys.argv) > 2 else ARRIVAL_S)
