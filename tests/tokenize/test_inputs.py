"""Inputs come a few parts at a time, the earlier first, however many ask."""

import asyncio
from pathlib import Path

from obstore.store import MemoryStore

from draftmill.contracts.cards import InputFile
from draftmill.storage.patience import Patience
from draftmill.storage.store import Store
from draftmill.storage.transfer import Span, Transfers
from draftmill.tokenize.inputs import PARTS_FETCHED, Inputs
from draftmill.tokenize.pieces import Piece
from draftmill.tokenize.source import Source


class Noting(Transfers):
    """Fetches nothing, and notes which files are under way together."""

    def __init__(self) -> None:
        super().__init__(Patience(1))
        self.begun: list[str] = []
        self.under_way = self.most = 0

    async def download(self, span: Span, path: Path) -> None:
        self.begun.append(span.listed.key)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        path.write_bytes(bytes(span.stop - span.start))
        self.under_way -= 1


def test_two_parts_come_at_a_time_in_the_order_in_which_they_are_asked_for(tmp_path: Path):
    files = tuple(InputFile(key=f"{i}.jsonl", size=3, identity="etag:x") for i in range(7))
    source = Source(Store("s3://bucket/in", MemoryStore()), files, {file.key: file for file in files}, {})
    transfers = Noting()
    inputs = Inputs(source, tmp_path / "inputs", transfers)

    async def obtain_all() -> None:
        await asyncio.gather(*(inputs.obtain([Piece(file=file, start=0, stop=3)]) for file in files))

    asyncio.run(obtain_all())
    assert transfers.begun == [file.key for file in files]
    assert transfers.most == PARTS_FETCHED == 2
