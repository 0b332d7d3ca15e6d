"""The pieces of a part as local files: where they lie on a local disk, fetched ahead of the workers from a store."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from draftmill.contracts.errors import StorageError
from draftmill.storage.fetch import SHA256
from draftmill.storage.store import sha256_of
from draftmill.storage.transfer import Span, Transfers, together
from draftmill.tokenize.lines import LocalPiece
from draftmill.tokenize.pieces import Piece
from draftmill.tokenize.source import Source

# The earlier first: where bandwidth is short, the workers and the uploads behind them begin with the first part.
PARTS_FETCHED = 2


class Inputs:
    """What parts are made of, in `folder` while it is needed."""

    def __init__(self, source: Source, folder: Path, transfers: Transfers) -> None:
        self._source, self._folder, self._transfers = source, folder, transfers
        self._checked: dict[str, asyncio.Task[None]] = {}
        self._fetching = asyncio.Semaphore(PARTS_FETCHED)
        folder.mkdir(parents=True, exist_ok=True)

    async def obtain(self, pieces: Sequence[Piece]) -> tuple[LocalPiece, ...]:
        """The pieces, to be read here; StorageError where they are not what was listed or what their card says."""
        async with self._fetching, together() as tasks:
            found = [tasks.create_task(self._obtain(piece)) for piece in pieces]
        return tuple(task.result() for task in found)

    async def _obtain(self, piece: Piece) -> LocalPiece:
        if self._source.store.folder is not None:
            return await self._lying(piece, self._source.store.folder)
        path = self._copy_of(piece)
        if not (path.is_file() and path.stat().st_size == piece.stop - piece.start):
            listed = self._source.listed[piece.file.key]
            await self._transfers.download(Span(self._source.store, listed, piece.start, piece.stop), path)
        if self._source.is_checked:
            await self._compare(path, piece)
        return LocalPiece(path=str(path), key=piece.file.key, start=0, stop=piece.stop - piece.start, version="")

    async def _lying(self, piece: Piece, folder: Path) -> LocalPiece:
        key = piece.file.key
        if self._source.is_checked:
            if key not in self._checked:
                self._checked[key] = asyncio.ensure_future(self._compare(folder / key, piece))
            await self._checked[key]
        version = self._source.listed[key].identity
        return LocalPiece(path=str(folder / key), key=key, start=piece.start, stop=piece.stop, version=version)

    async def _compare(self, path: Path, piece: Piece) -> None:
        """Compares a whole file with the hash on its producer's card."""
        if await asyncio.to_thread(sha256_of, path) == piece.file.identity.removeprefix(SHA256):
            return
        if self._source.store.folder is None:
            path.unlink()
        raise StorageError(
            f"{self._source.store.url}/{piece.file.key} is not what its card says: {piece.file.size:,} bytes, but of "
            "other content; it was damaged or changed: make that set again, or fetch it again"
        )

    def _copy_of(self, piece: Piece) -> Path:
        """A name that tells the version of the piece, so that the next run can take up what a killed one fetched."""
        version = self._source.listed[piece.file.key].identity
        said = f"{self._source.store.url}/{piece.file.key}\n{version}\n{piece.name}"
        return self._folder / hashlib.sha256(said.encode()).hexdigest()[:32]

    def release(self, pieces: Sequence[Piece]) -> None:
        """The pieces are not needed any more."""
        if self._source.store.folder is None:
            for piece in pieces:
                self._copy_of(piece).unlink(missing_ok=True)
