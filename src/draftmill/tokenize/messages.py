"""What the run and its workers say to each other: typed messages over a socket, each behind its length."""

import asyncio
import socket
import struct

import msgspec

from draftmill.tokenize.ledger import Made
from draftmill.tokenize.part import PartJob

_LENGTH = struct.Struct(">I")


class Read(msgspec.Struct, frozen=True, tag="read"):
    """A worker has come further with its part."""

    bytes: int
    """Of input, as stored, since the last message."""
    rows: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A worker has written its part's shard."""

    made: Made
    grown_bytes: int
    """What the worker's memory has gained since it was forked."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A failure that its reader can mend."""

    kind: str
    """Name of a class in contracts/errors.py."""
    message: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The nursery has loaded the tokenizer."""

    num_threads: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker is no more."""

    pid: int
    status: int
    """Its exit code, or minus the signal that ended it."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """A worker has begun."""

    pid: int


FromWorker = Read | Done | Failed
FromNursery = Ready | Failed | Forked | Ended

_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_nursery = msgspec.msgpack.Decoder(FromNursery)
_job = msgspec.msgpack.Decoder(PartJob)


def send(channel: socket.socket, message: FromWorker | FromNursery) -> None:
    """Says `message`; OSError where nobody listens any more."""
    channel.sendall(framed(msgspec.msgpack.encode(message)))


def framed(data: bytes) -> bytes:
    """The data behind their length."""
    return _LENGTH.pack(len(data)) + data


def receive(channel: socket.socket) -> bytes | None:
    """The next message as bytes; None where the other side has hung up."""
    head = _exactly(channel, _LENGTH.size)
    return head and _exactly(channel, _LENGTH.unpack(head)[0])


def next_job(channel: socket.socket) -> PartJob | None:
    """The next part to make; None where the run has ended."""
    data = receive(channel)
    return _job.decode(data) if data else None


def encode_job(job: PartJob) -> bytes:
    """A part to make, as it is sent."""
    return framed(msgspec.msgpack.encode(job))


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        block = channel.recv(size - len(data))
        if not block:
            return None
        data += block
    return data


async def heard_from_worker(reader: asyncio.StreamReader) -> FromWorker:
    """The next message of a worker; asyncio.IncompleteReadError or ConnectionError where it has died."""
    return _from_worker.decode(await _frame(reader))


async def heard_from_nursery(reader: asyncio.StreamReader) -> FromNursery:
    """The next message of the nursery; asyncio.IncompleteReadError or ConnectionError where it has died."""
    return _from_nursery.decode(await _frame(reader))


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(size)
