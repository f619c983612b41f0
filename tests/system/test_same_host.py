"""Workers of one machine read KV where it lies; whoever is killed leaves nothing of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import START_S, Cluster, until
from tests.oracle import hash_oracle
from wire.options import Options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
# These prompts are small: by itself their KV would go along with the offer.
ON_CREDIT = ("--kv-unasked-bytes", "0")
PROMPTS = [[first, 7, 9] * 60 for first in range(6)]
NUM_TOKENS = 8


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, local="", executor="hash") as cluster:
        yield cluster


def answers(cluster: Cluster) -> bool:
    """Whether every prompt is answered as it has to be."""
    for prompt in PROMPTS:
        fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        [choice] = cluster.choices(prompt, **fields)
        if choice["token_ids"] != hash_oracle(prompt, NUM_TOKENS, Options(ignore_eos=True)):
            return False
    cluster.until_idle()
    return True


def mapped_to_read(pid: int) -> int:
    """How much memory of others a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:baton-kv" in line and line.split()[1] == "r--s" for line in maps)


def listening() -> dict[str, str]:
    """The sockets of this machine at which memory is lent: names, by inode."""
    rows = (row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[6]: row[7] for row in rows if len(row) > 7 and row[7].startswith("@baton-")}


def lent_by(pid: int) -> set[str]:
    """Where a process lends its memory, which is in no file system."""
    assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
    opened = {os.readlink(it) for it in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for inode, name in listening().items() if f"socket:[{inode}]" in opened}


def num_opened(process: subprocess.Popen[bytes]) -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def test_a_worker_that_is_killed_leaves_no_memory_and_no_name(cluster: Cluster) -> None:
    decode, prefill = cluster.worker("decode", 0, *ON_CREDIT), cluster.worker("prefill", 0)
    assert answers(cluster) and mapped_to_read(decode.pid) == 1
    until(lambda: len(cluster.events("KV is read from memory")) == 1, "it is said once")
    descriptors = num_opened(decode)
    names = lent_by(prefill.pid)
    assert len(names) == 1
    prefill.send_signal(signal.SIGKILL)
    prefill.wait(START_S)
    until(lambda: not mapped_to_read(decode.pid), "the memory of the dead is unmapped")
    assert not names.intersection(listening().values())
    again = cluster.worker("prefill", 0)
    assert answers(cluster) and mapped_to_read(decode.pid) == 1
    until(lambda: num_opened(decode) == descriptors, "as many descriptors as before")
    decode.send_signal(signal.SIGKILL)
    decode.wait(START_S)
    cluster.until_idle()
    another = cluster.worker("decode", 0, *ON_CREDIT)
    assert answers(cluster) and mapped_to_read(another.pid) == 1
    names = lent_by(again.pid)
    assert len(names) == 1
    for process in (again, another):
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
    assert not names.intersection(listening().values())
