"""Blocks on disk survive a restart and kills; torn, damaged and foreign ones are not used."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.worker.tiers.chains import chain
from tests.worker.tiers.disk_writer import NUM_SLOTS, of, open_disk
from wire.parts import Buffer
from worker.tiers.disk import Disk, Files, Slot
from worker.tiers.keys import BlockKey
from worker.tiers.records import Checksum, Encryption, RecordFormat, Seal

ROOT = Path(__file__).resolve().parents[3]
KEYS = chain(1, 2, 3, 4)
KV_BYTES = 40
NUM_KILLS = int(os.environ.get("TIER_KILLS", "12"))


def kv(key: BlockKey) -> bytes:
    return key.digest[:8] * (KV_BYTES // 8)


def open_small(
    folder: Path, num_slots: int = 4, seal: Seal | None = None, files: Files | None = None
) -> Disk:
    record = RecordFormat(1, KV_BYTES, b"model", seal or Checksum())
    return Disk(folder, record, num_slots * record.total_bytes, files)


def written(folder: Path, seal: Seal | None = None) -> list[Slot]:
    """Write all keys, and close the disk."""
    disk = open_small(folder, seal=seal)
    slots = disk.write([(number, key, kv(key)) for number, key in enumerate(KEYS)])
    disk.close()
    return slots


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    slots = written(tmp_path)
    disk = open_small(tmp_path)
    assert [*disk.scan()] == [*zip(slots, KEYS, strict=True)]
    assert [disk.read(slot, key) for slot, key in zip(slots, KEYS, strict=True)] == [*map(kv, KEYS)]


def test_a_block_takes_the_place_of_another(tmp_path: Path) -> None:
    (slot, *_) = written(tmp_path)
    disk, (new,) = open_small(tmp_path), chain(9)
    (taken,) = disk.write([(0, new, kv(new))])
    assert disk.read(taken, new) == kv(new)
    assert disk.read(slot, KEYS[0]) is None, "whoever still wants the old one notices"
    assert [found[1] for found in disk.scan() if found] == [new, *KEYS[1:]]
    sizes = [(tmp_path / name).stat().st_size for name in ("headers", "kv")]
    assert sum(sizes) == 4 * disk.record_bytes


def test_damaged_torn_and_foreign_files_are_skipped(tmp_path: Path) -> None:
    slots = written(tmp_path)
    headers, content = tmp_path / "headers", tmp_path / "kv"
    whole = headers.read_bytes()
    size = len(whole) // 4
    damaged = bytearray(whole)
    damaged[size + 20] ^= 1
    headers.write_bytes(damaged[: 3 * size + 5])  # one has another bit, the last is torn
    content.write_bytes(content.read_bytes()[:-1])
    disk = open_small(tmp_path)
    found = [*disk.scan()]
    assert [it and it[1] for it in found] == [KEYS[0], None, KEYS[2], None]
    assert disk.read(slots[3], KEYS[3]) is None
    disk.close()
    headers.write_bytes(os.urandom(len(whole)))
    assert [*open_small(tmp_path).scan()] == [None] * 4


def test_encrypted_files_need_the_key(tmp_path: Path) -> None:
    slots = written(tmp_path, Encryption(b"one"))
    files = b"".join((tmp_path / name).read_bytes() for name in ("headers", "kv"))
    assert not any(kv(key)[:8] in files for key in KEYS)
    for seal, expected in ((Encryption(b"other"), None), (Encryption(b"one"), kv(KEYS[0]))):
        disk = open_small(tmp_path, seal=seal)
        assert disk.read(slots[0], KEYS[0]) == expected
        assert [it is not None for it in disk.scan()] == [expected is not None] * 4
        disk.close()


def test_files_are_this_user_s_and_one_process_s(tmp_path: Path) -> None:
    disk = open_small(tmp_path / "a")
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BlockingIOError):
        open_small(tmp_path / "a")
    disk.close()
    open_small(tmp_path / "a").close()


def test_a_smaller_limit_holds_at_once(tmp_path: Path) -> None:
    written(tmp_path)
    disk = open_small(tmp_path, num_slots=2)
    assert [found[1] for found in disk.scan() if found] == KEYS[:2]
    assert (tmp_path / "kv").stat().st_size + (tmp_path / "headers").stat().st_size == (
        2 * disk.record_bytes
    )
    with pytest.raises(ValueError, match="--disk-kv-bytes is 0, and one block takes"):
        open_small(tmp_path, num_slots=0)


class ShortWrites(Files):
    """Writes few bytes at a time, as a system call may, then fails for lack of space."""

    def __init__(self, num_writes: int) -> None:
        self.num_left = num_writes

    def write(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
        whole = b"".join(parts)
        for start in range(0, len(whole), 7):
            if not self.num_left:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.num_left -= 1
            super().write(descriptor, [whole[start : start + 7]], offset + start)


@pytest.mark.parametrize("num_writes", range(0, 36, 3))
def test_a_write_that_fails_half_way_leaves_nothing_wrong(tmp_path: Path, num_writes: int) -> None:
    slots = written(tmp_path)
    disk = open_small(tmp_path, files=ShortWrites(num_writes))
    new = chain(7, 8)
    with pytest.raises(OSError, match="No space"):
        disk.write([(number, key, kv(key)) for number, key in enumerate(new)])
    for it in disk.scan():
        if it is not None:
            assert disk.read(*it) in (None, kv(it[1]))
    assert disk.read(slots[3], KEYS[3]) == kv(KEYS[3])


def test_many_parts_are_written_whole(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        Files().write(file.fileno(), [b"ab", bytearray(b"c"), memoryview(b"defg")], 3)
        assert Files().read(file.fileno(), 99, 0) == b"\0\0\0abcdefg"
        Files().synchronize(file.fileno())


@pytest.mark.timeout(60 + 5 * NUM_KILLS)
def test_kill_9_while_writing_leaves_nothing_wrong(tmp_path: Path) -> None:
    """`TIER_KILLS` asks for more."""
    draw, num_intact, num_torn = random.Random(5), 0, 0
    for seed in range(NUM_KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.tiers.disk_writer", str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert writer.stdout is not None
        for _ in range(draw.randint(1, 4)):
            assert writer.stdout.readline(), "it writes"
        time.sleep(draw.random() * 0.01)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        disk = open_disk(tmp_path)
        for found in disk.scan():
            content = None if found is None else disk.read(*found)
            num_torn += content is None
            num_intact += content is not None
            assert found is None or content in (None, of(found[1]))
        disk.close()
    assert num_intact > NUM_KILLS * NUM_SLOTS // 8
    logging.info("%d kills: %d intact, %d torn", NUM_KILLS, num_intact, num_torn)
