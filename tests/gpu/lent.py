"""Memory of a GPU that two processes share: the copy is right, survives its owner, and is timed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch

from kernels.cuda.copy_streams import Lane
from kernels.cuda.device_memory import DeviceMemory
from tests.gpu.settings import Part, Settings, Unavailable, lane_of
from tests.gpu.timing import wall_s
from tests.gpu.trail import Figures
from tests.gpu.verify import Wrong

ROOT = Path(__file__).resolve().parents[2]
# Of one block of a model of 8B, of 16 tokens; and of one segment, by default and at most.
PIECE_BYTES = 2 << 20
SEGMENTS = (64 << 20, 256 << 20)


def piece_parts(settings: Settings) -> dict[str, Part]:
    """Pieces that another process has written, against what it has written; and what is none."""
    return {"pieces": partial(_pieces, settings), "refusals": partial(_refusals, settings)}


def _refusals(settings: Settings) -> Figures:
    """The driver maps nothing beyond the end of memory, and nothing that is none."""
    lane, (reading, writing) = _lane(settings), os.pipe()
    ours = _allocated(lane, 1 << 20)
    num_bytes = len(ours)
    cases = ((ours.descriptor, 2 * num_bytes), (ours.descriptor, 1 << 40), (reading, num_bytes))
    for descriptor, size in cases:
        try:
            DeviceMemory.map(lane, descriptor, b"cuda %d" % size)
        except OSError:
            continue
        raise Wrong(f"{size} bytes of descriptor {descriptor} are mapped, of {num_bytes}")
    os.close(reading)
    os.close(writing)
    return {"cases": len(cases)}


def _pieces(settings: Settings) -> Figures:
    """Sizes around those of a thread block; the process that wrote them is killed at last."""
    draw, num_bytes = settings.random("pieces"), settings.size(64 << 20, 1 << 20)
    with _borrowed(settings, num_bytes) as (lane, theirs, lender):
        ours, written = _allocated(lane, num_bytes), _content(num_bytes)
        for size in (16, 2048, 16 << 10, (16 << 10) + 16, 300_000 // 16 * 16):
            places = _drawn(draw, num_bytes, size, 3)
            _check(lane, theirs, ours, places, size, draw.getrandbits(64), written)
        lender.kill()
        lender.wait()
        _check(lane, theirs, ours, places, size, 7, written)
    return {"cases": 6}


def _check(
    lane: Lane,
    theirs: DeviceMemory,
    ours: DeviceMemory,
    places: list[int],
    size: int,
    seed: int,
    written: torch.Tensor,
) -> None:
    targets = [number * size for number in range(len(places))]
    digest, room = theirs.copy(places, size, ours, targets, seed), theirs.room(len(places) * size)
    into_room = theirs.copy(places, size, room, targets, seed)
    wanted = torch.cat([written[place : place + size] for place in places])
    for what, got in (
        ("memory", lane.tensor(ours)[: len(wanted)].cpu()),
        ("the host", torch.from_numpy(room.bytes)),
    ):
        if not torch.equal(got, wanted):
            raise Wrong(f"pieces of {size} bytes at {places} did not come to {what} as written")
    if not digest == into_room == ours.digest(targets, size, seed) == digest_of(wanted, seed):
        raise Wrong(f"the digest of pieces of {size} bytes at {places}, seeded {seed}, is another")


def lent(settings: Settings) -> Figures:
    """Blocks anywhere, from one process to the other: every byte is read and written once."""
    rates = []
    sizes, piece = settings.size(SEGMENTS, (1 << 20,)), settings.size(PIECE_BYTES, 64 << 10)
    with _borrowed(settings, 2 * sizes[-1]) as (lane, theirs, _):
        ours = _allocated(lane, 2 * sizes[-1])
        for size in sizes:
            blocks = Random(1).sample(range(2 * sizes[-1] // piece), 2 * (size // piece))
            places, targets = ([it * piece for it in blocks[start::2]] for start in (0, 1))
            seconds = wall_s(partial(theirs.copy, places, piece, ours, targets, 7))
            rates.append(2 * size / seconds / 1e9)
    return {"lent_gbs": rates[0], "lent_largest_gbs": rates[-1]}


@contextmanager
def _borrowed(
    settings: Settings, num_bytes: int
) -> Iterator[tuple[Lane, DeviceMemory, subprocess.Popen[bytes]]]:
    """Map what another process has made and written, and keep that process until the end."""
    lane, (ours, theirs) = _lane(settings), socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-m", "tests.gpu.lent", settings.backend]
        lender = subprocess.Popen(
            [*command, str(theirs.fileno()), str(num_bytes)],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            about, descriptors, _, _ = socket.recv_fds(ours, 100, 1)
            if not descriptors:
                raise Unavailable(about.decode() or "the other process has ended")
            memory = DeviceMemory.map(lane, descriptors[0], about)
            os.close(descriptors[0])
            yield lane, memory, lender
        finally:
            lender.kill()
            lender.wait()


def lend(settings: Settings, descriptor: int, num_bytes: int) -> None:
    """Make memory, write it, hand its descriptor out, and wait for the end."""
    with socket.socket(fileno=descriptor) as connection:
        lane = _lane(settings)
        try:
            memory = DeviceMemory.allocate(lane, num_bytes)
        except OSError as error:
            connection.send(str(error).encode())
            return
        lane.tensor(memory)[:num_bytes].copy_(_content(num_bytes))
        lane.mark()
        memory.digest([0], num_bytes, 0)  # which waits until it is written
        socket.send_fds(connection, [memory.about], [memory.descriptor])
        connection.recv(1)


def digest_of(kv: torch.Tensor, seed: int) -> int:
    """Return the digest of bytes as SPEC 6.8 says it."""
    words = kv.numpy().view(np.uint64)
    with np.errstate(over="ignore"):
        places = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (words ^ np.uint64(seed)) + places
        x = (x ^ x >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
        return int((x ^ x >> np.uint64(29)).sum(dtype=np.uint64))


def _allocated(lane: Lane, num_bytes: int) -> DeviceMemory:
    try:
        return DeviceMemory.allocate(lane, num_bytes)
    except OSError as error:
        raise Unavailable(str(error)) from None


def _content(num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def _drawn(draw: Random, num_bytes: int, size: int, count: int) -> list[int]:
    return [draw.randrange((num_bytes - size) // 16 + 1) * 16 for _ in range(count)]


def _lane(settings: Settings) -> Lane:
    if settings.backend == "shim":
        from tests.kernels.shim import driver

        driver.install()
    return lane_of(settings, torch.bfloat16)


if __name__ == "__main__":
    backend, number, size = sys.argv[1:]
    lend(Settings(backend, 0, is_quick=False), int(number), int(size))
