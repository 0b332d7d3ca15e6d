"""Chat completions to training tokens, one process: ours against what others do, in CPU-seconds of one interleaved run.

    ours        JSON lines -> ids and masks -> an Arrow shard, as a worker of `draftmill tokenize` does it
    map         datasets.map(num_proc=2) with apply_chat_template, one encode with offsets, a mask, save_to_disk
    encode      one Hugging Face encode with offsets of texts that are rendered already, and nothing else
    specforge   PyPI specforge 0.2.0's own preprocessing, on rows of 1, 8 and 20 turns

Every way runs in a process of its own, first on a quarter of its rows and then on all of them: only the second counts,
start-up left out (what map's own two processes need to start is taken off by the first).
Data are tokenize_data.py's, tokenizer and template Qwen3.6's. `python bench/tokenize_rows.py [rows for ours]`
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import tokenize_data

sys.path.append(str(Path(__file__).parents[1] / "tests"))

ROUNDS = 3
STORY_ROWS = 902_087
CHUNK_LINES = 200
# Others get fewer rows: they take milliseconds for one.
FEWER = 20
MAX_TOKENS = 100_000
TURNS = (1, 8, 20)

Way = Callable[[int], int]
"""Makes so many rows; returns their tokens."""


def ours(folder: Path, file: Path) -> Way:
    """A worker: lines to shard."""
    from draftmill.tokenize.nursery import settle
    from draftmill.tokenize.shards import ShardWriter

    maker = _maker(folder)
    settle()

    def make(num_rows: int) -> int:
        tokens = 0
        with ShardWriter(file.with_suffix(".arrow")) as shard:
            for lines in _chunks(file, num_rows):
                batch = maker.make(lines, file.name)
                shard.add(batch)
                tokens += len(batch.input_ids)
        return tokens

    return make


def _maker(folder: Path) -> Any:
    from draftmill.tokenize.rows import RowMaker, RowMakerSpec

    return RowMaker(RowMakerSpec(folder, "faithful", MAX_TOKENS))


def _chunks(file: Path, num_rows: int) -> list[list[tuple[int, bytes]]]:
    with file.open("rb") as stream:
        lines = [(number + 1, line.rstrip(b"\n")) for number, line in enumerate(islice(stream, num_rows))]
    return [lines[i : i + CHUNK_LINES] for i in range(0, len(lines), CHUNK_LINES)]


def hf_map(folder: Path, file: Path) -> Way:
    """As many a script does it, rows one by one, with a mask from the text's headers."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    answer = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{k: v for k, v in message.items() if v is not None} for message in row["messages"]]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [match.span(1) for match in answer.finditer(text)]
        mask = [int(any(a <= start and stop <= b for a, b in spans)) for start, stop in made["offset_mapping"]]
        return {"input_ids": made["input_ids"], "loss_mask": mask}

    def make(num_rows: int) -> int:
        rows = [json.loads(line) for chunk in _chunks(file, num_rows) for _, line in chunk]
        data = Dataset.from_list([{"id": row["id"], "messages": row["messages"]} for row in rows])
        made = data.map(prepare, num_proc=2, remove_columns=["messages"], load_from_cache_file=False)
        made.save_to_disk(str(file.with_suffix(f".saved{num_rows}")))
        return sum(len(ids) for ids in made["input_ids"])

    return make


def hf_encode(folder: Path, file: Path) -> Way:
    """One encode with offsets, the texts rendered beforehand."""
    from tokenizers import Tokenizer

    from draftmill.contracts.rows import read_row

    maker, tokenizer = _maker(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = (read_row(line) for lines in _chunks(file, sys.maxsize) for _, line in lines)
    texts = [sample.content.text for row in rows for sample in maker.fast.unfold(row)]
    return lambda num_rows: sum(
        len(tokenizer.encode(text, add_special_tokens=False).offsets) for text in texts[:num_rows]
    )


def specforge(folder: Path, file: Path) -> Way:
    """Its own preprocessing, as its trainer calls it."""
    from specforge.data.preprocessing import preprocess_conversations
    from specforge.data.template import TEMPLATE_REGISTRY
    from transformers import AutoTokenizer

    tokenizer, template = AutoTokenizer.from_pretrained(folder), TEMPLATE_REGISTRY.get("qwen3-thinking")

    def make(num_rows: int) -> int:
        rows = [json.loads(line)["messages"] for chunk in _chunks(file, num_rows) for _, line in chunk]
        made = preprocess_conversations(tokenizer, rows, template, MAX_TOKENS, tools=[[] for _ in rows])
        return sum(ids.shape[1] for ids in made["input_ids"])

    return make


WAYS = {"ours": ours, "map": hf_map, "encode": hf_encode, "specforge": specforge}


def _cpu_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def spend(way: str, folder: Path, file: Path, num_rows: int) -> dict[str, float]:
    """CPU-seconds and tokens of all rows but a quarter, in this process."""
    make, few = WAYS[way](folder, file), num_rows // 4
    start = _cpu_s()
    before = make(few)
    middle = _cpu_s()
    tokens = make(num_rows)
    end = _cpu_s()
    # Ours keeps nothing but its caches between the two; what map's processes need to start is in both.
    is_warm = way != "map"
    cpu_s = end - middle if is_warm else (end - middle) - (middle - start)
    return {"cpu_s": cpu_s, "tokens": tokens if is_warm else tokens - before, "rows": num_rows - (not is_warm) * few}


def measure(way: str, folder: Path, file: Path, num_rows: int) -> dict[str, float]:
    """What a way spends in a process of its own."""
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder), "--file", str(file)]
    done = subprocess.run([*command, "--count", str(num_rows)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
    spent = json.loads(done.stdout.splitlines()[-1])
    return {
        "ms_per_row": spent["cpu_s"] / spent["rows"] * 1e3,
        "tok_per_cpu_s": spent["tokens"] / spent["cpu_s"],
        "tokens_per_row": spent["tokens"] / spent["rows"],
    }


def shares(folder: Path, file: Path, num_rows: int) -> dict[str, float]:
    """Milliseconds a row of each stage of ours, in this process."""
    from draftmill.contracts.rows import read_row
    from draftmill.tokenize.shards import ShardWriter

    maker, spent = (
        _maker(folder),
        dict.fromkeys(("parse", "render", "encode", "mask", "check and columns", "write"), 0.0),
    )

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = work()
        spent[stage] += time.process_time() - start
        return made

    ours(folder, file)(num_rows)  # what is imported, or started, at the first shard
    for chunk in _chunks(file, num_rows):
        maker.make(chunk, file.name)
    with ShardWriter(file.with_suffix(".arrow")) as shard:
        for chunk in _chunks(file, num_rows):
            rows = timed("parse", lambda chunk=chunk: [read_row(line) for _, line in chunk])
            drawn = timed("render", lambda rows=rows: [maker.fast.unfold(row) for row in rows])
            texts = [sample.content for samples in drawn for sample in samples]
            words = [turns.text for turns in texts]
            timed("encode", lambda words=words: maker.fast.encoder.engine.encode_batch(words, parallel=False))
            timed("mask", lambda texts=texts: maker.fast.encoder.encode(texts))
            batch = timed("check and columns", lambda chunk=chunk: maker.make(chunk, file.name))
            timed("write", lambda batch=batch: shard.add(batch))
    spent["check and columns"] -= spent["parse"] + spent["render"] + spent["mask"]
    spent["mask"] -= spent["encode"]
    return {stage: seconds / num_rows * 1e3 for stage, seconds in spent.items()}


def footprint(folder: Path, file: Path, num_rows: int) -> dict[str, float]:
    """Start-up in seconds, a forked worker's own memory at the start and after its rows in MiB, bytes a token."""
    import pyarrow as pa

    start, cpu = time.monotonic(), time.process_time()
    maker = _maker(folder)
    started = {"start_s": time.monotonic() - start, "start_cpu_s": time.process_time() - cpu}
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        before = _own_mib()
        for lines in _chunks(file, num_rows):
            maker.make(lines, file.name)
        os.write(write_end, json.dumps([before, _own_mib()]).encode())
        os._exit(0)
    os.wait()
    before, after = json.loads(os.read(read_end, 4096))
    shard = file.with_suffix(".arrow").read_bytes()
    tokens = sum(int(n) for n in _lengths(file.with_suffix(".arrow")))
    packed = len(pa.compress(shard, codec="zstd", asbytes=True))
    return {
        **started,
        "worker_mib_at_start": before,
        "worker_mib_after_rows": after,
        "bytes_per_token": len(shard) / tokens,
        "zstd_bytes_per_token": packed / tokens,
    }


def _lengths(shard: Path) -> list[int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.list_value_length(pa.ipc.open_stream(shard.read_bytes()).read_all()["input_ids"]).to_pylist()


def _own_mib() -> float:
    fields = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    own = {name: int(value.split()[0]) for name, value in (line.split(":") for line in fields)}
    return (own["Private_Dirty"] + own["Private_Clean"]) / 1024


def main(num_rows: int) -> None:
    from qwen_folder import write_qwen_tokenizer

    with tempfile.TemporaryDirectory() as place:
        folder = write_qwen_tokenizer(Path(place) / "qwen")
        file = tokenize_data.write(Path(place) / "rows.jsonl", num_rows)
        figures: dict[str, Any] = {"bench": "tokenize_rows", "rows": num_rows}
        ways = {"ours": num_rows, "map": max(num_rows // FEWER, 80), "encode": max(num_rows // FEWER, 80)}
        figures |= _compared(ways, folder, file)
        figures["several_turns"] = {turns: _several(folder, Path(place), turns, num_rows) for turns in TURNS}
        figures["ms_per_row_by_stage"] = _shares(folder, file, min(num_rows, 2_000))
        figures |= _footprint(folder, file, num_rows)
    print(json.dumps(figures))


def _compared(ways: dict[str, int], folder: Path, file: Path) -> dict[str, Any]:
    rounds = [{way: measure(way, folder, file, count) for way, count in ways.items()} for _ in range(ROUNDS)]
    print(f"{ways['ours']} rows for ours, {ways['map']} for the others; medians of {ROUNDS} interleaved rounds")
    for way in ways:
        row_ms = median(made[way]["ms_per_row"] for made in rounds)
        ratio = median(made[way]["ms_per_row"] / made["ours"]["ms_per_row"] for made in rounds)
        rate = median(made[way]["tok_per_cpu_s"] for made in rounds)
        print(f"  {way:<10}{row_ms:>8.3f} CPU-ms a row {rate:>12,.0f} tokens/CPU-s {ratio:>7.1f} x ours")
    own_ms = median(made["ours"]["ms_per_row"] for made in rounds)
    minutes = own_ms / 1e3 * STORY_ROWS / 2 / 60
    print(f"  {STORY_ROWS:,} such rows: {minutes:.1f} min on two idle cores")
    ratios = {
        f"{way}_over_ours": median(made[way]["ms_per_row"] / made["ours"]["ms_per_row"] for made in rounds)
        for way in ways
        if way != "ours"
    }
    tokens_per_row = rounds[0]["ours"]["tokens_per_row"]
    return {"ours_ms_per_row": own_ms, "minutes": minutes, "tokens_per_row": tokens_per_row, **ratios}


def _several(folder: Path, place: Path, turns: int, num_rows: int) -> dict[str, float]:
    """Tokens a CPU-second of rows of so many turns."""
    count = max(num_rows // FEWER, 80)
    file = tokenize_data.write(place / f"turns{turns}.jsonl", count * 4, turns)
    counts = {"ours": count * 4, "encode": count}
    if find_spec("specforge") is not None:
        counts["specforge"] = max(count // turns, 40)  # it renders and encodes a row anew for each of its turns
    made = {way: measure(way, folder, file, n)["tok_per_cpu_s"] for way, n in counts.items()}
    print(f"  {turns:>2} turns: " + ", ".join(f"{way} {rate:,.0f} tokens/CPU-s" for way, rate in made.items()))
    return made


def _shares(folder: Path, file: Path, num_rows: int) -> dict[str, float]:
    spent = shares(folder, file, num_rows)
    whole = sum(spent.values())
    print("  stages of ours: " + ", ".join(f"{name} {ms / whole:.0%}" for name, ms in spent.items()))
    return spent


def _footprint(folder: Path, file: Path, num_rows: int) -> dict[str, float]:
    ours(folder, file)(num_rows)
    found = footprint(folder, file, num_rows)
    print("  " + ", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="?", type=int, default=20_000)
    for name in ("way", "folder", "file", "count"):
        parser.add_argument(f"--{name}")
    asked = parser.parse_args()
    if asked.way is None:
        main(asked.rows)
    else:
        print(json.dumps(spend(asked.way, Path(asked.folder), Path(asked.file), int(asked.count))))
