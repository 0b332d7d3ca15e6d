"""Large objects to and from a store, many at a time: by ranges and in parts, checked by size and hash, asked again.

A download names the version it wants, so that an object replaced under a run is noticed at the first byte; an upload
leaves its sha256 with the object and looks at what the store says is there afterwards.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import StorageError
from draftmill.storage.local import no_room, place
from draftmill.storage.patience import Patience
from draftmill.storage.store import ETAG, Store, described, sha256_of

if TYPE_CHECKING:
    from obstore import GetOptions

MAX_REQUESTS = 32
"""Ranges under way at a time."""
RANGE_BYTES = 16 << 20
SHA256_ATTRIBUTE = "draftmill-sha256"
_BLOCK_BYTES = 1 << 20
# 8 MiB, four at a time, is what an upload holds in memory; S3 takes 10,000 parts of an object, which is 80 GB.
_UPLOAD_PART_BYTES, _UPLOAD_PARTS = 8 << 20, 4

T = TypeVar("T")


@dataclass(frozen=True)
class Span:
    """Bytes `start..stop` (half-open) of one version of an object."""

    store: Store
    listed: InputFile
    """As the store lists it; its identity names the version."""
    start: int
    stop: int

    @property
    def place(self) -> str:
        """What messages call it."""
        return f"{self.store.url}/{self.listed.key}"

    def options(self, start: int, stop: int) -> GetOptions:
        """Asks for a part of the span, in this version alone."""
        etag = self.listed.identity.removeprefix(ETAG)
        known: GetOptions = {"if_match": etag} if etag != str(None) else {}
        return {"range": (start, stop), **known}

    def changed(self) -> StorageError:
        """The object is another one than was listed."""
        return StorageError(
            f"{self.place} was changed or removed after it was listed, so rows before and after the change would be "
            "mixed: leave inputs alone while they are read, and run the same command again"
        )


class Transfers:
    """All transfers of a run: they share one limit of requests and one patience."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    async def download(self, span: Span, path: Path) -> None:
        """Fetches the span into `path`, whole or not at all; StorageError where the object was changed."""
        draft = path.with_name(f"{path.name}.part")
        with _opened(draft) as descriptor:
            async with together() as tasks:
                for start in range(span.start, span.stop, RANGE_BYTES):
                    stop = min(start + RANGE_BYTES, span.stop)
                    tasks.create_task(self._range(span, start, stop, descriptor))
        draft.replace(path)

    async def _range(self, span: Span, start: int, stop: int, descriptor: int) -> None:
        at, attempt = start, 0
        while at < stop:
            before = at
            async with self._requests:
                failure: Exception = ConnectionError(f"the answer ended at byte {at:,} of {stop:,}")
                try:
                    async for block in _blocks(span, at, stop):
                        at += _write(descriptor, block, at - span.start)
                    self._patience.answered()
                except (PreconditionError, FileNotFoundError) as error:
                    raise span.changed() from error
                except BaseError as error:
                    failure = error
            attempt = 1 if at > before else attempt + 1
            if at < stop:
                await self._patience.wait(span.place, failure, attempt)

    async def upload(self, store: Store, key: str, path: Path, sha256: str) -> None:
        """Gives the object `key` the bytes of `path`, whole or not at all, and sees that they are there."""
        if store.folder is not None:
            await asyncio.to_thread(place, path, store.folder / key)
            return
        await self._put(store, key, path, (path.stat().st_size, sha256))

    async def put(self, store: Store, key: str, data: bytes) -> None:
        """As `upload`, for a few bytes."""
        if store.folder is not None:
            await asyncio.to_thread(store.put, key, data)
            return
        await self._put(store, key, data, (len(data), sha256_of(data)))

    async def _put(self, store: Store, key: str, data: bytes | Path, witness: tuple[int, str]) -> None:
        async def once() -> None:
            await obstore.put_async(
                store.uploads,
                key,
                data,
                attributes={SHA256_ATTRIBUTE: witness[1]},
                chunk_size=_UPLOAD_PART_BYTES,
                max_concurrency=_UPLOAD_PARTS,
            )
            there = await obstore.get_async(store.backend, key, options={"head": True})
            found = (there.meta["size"], there.attributes.get(SHA256_ATTRIBUTE, witness[1]))
            if found != witness:
                raise ConnectionError(f"{found[0]:,} of {witness[0]:,} bytes are there, or others than were sent")

        await self._insisting(f"{store.url}/{key}", once)

    async def _insisting(self, place: str, once: Callable[[], Awaitable[T]]) -> T:
        attempt = 0
        while True:
            try:
                answer = await once()
            except (BaseError, OSError) as error:
                attempt += 1
                await self._patience.wait(place, error, attempt)
                continue
            self._patience.answered()
            return answer

    async def stat(self, store: Store, key: str) -> InputFile | None:
        """The object as a listing shows it, or None where there is no such object."""
        if store.folder is not None:
            return store.stat(key)

        async def once() -> InputFile:
            return described(await obstore.head_async(store.backend, key))

        return await self._insisting(f"{store.url}/{key}", partial(_if_there, once))

    async def find(self, store: Store, key: str) -> bytes | None:
        """The bytes of an object, or None where there is no such object."""
        if store.folder is not None:
            return store.find(key)

        async def once() -> bytes:
            return bytes(await (await obstore.get_async(store.backend, key)).bytes_async())

        return await self._insisting(f"{store.url}/{key}", partial(_if_there, once))


async def _if_there(request: Callable[[], Awaitable[T]]) -> T | None:
    """What the request gives, None where there is no such object."""
    try:
        return await request()
    except FileNotFoundError:
        return None


async def _blocks(span: Span, start: int, stop: int) -> AsyncIterator[bytes]:
    """The bytes as they come, never more than were asked for."""
    found = await obstore.get_async(span.store.backend, span.listed.key, options=span.options(start, stop))
    if found.meta["size"] != span.listed.size:
        raise span.changed()
    left = stop - start
    async for block in found.stream(min_chunk_size=_BLOCK_BYTES):
        yield block[:left]
        left -= len(block)
        if left < 0:
            raise StorageError(f"{span.place}: the store sends more than the range it was asked for")


def _write(descriptor: int, block: bytes, at: int) -> int:
    """Writes the whole block; how many bytes that is."""
    done = 0
    try:
        while done < len(block):
            done += os.pwrite(descriptor, memoryview(block)[done:], at + done)
    except OSError as error:
        raise no_room(error, Path(f"/proc/self/fd/{descriptor}").readlink()) from error
    return done


@contextmanager
def _opened(draft: Path) -> Iterator[int]:
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        raise no_room(error, draft) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that end together: the first failure cancels the others, and is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: BaseException) -> BaseException:
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures
