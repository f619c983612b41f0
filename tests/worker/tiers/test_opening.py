"""Tiers are opened as configured; each model, layout and worker has files of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from errno import EIO
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.worker.tiers.chains import chain
from worker.engine.blocks import BlockPool
from worker.executor.hash import LAYOUT, MIXED, HashKVCache
from worker.tiers.disk import Disk, Slot
from worker.tiers.keys import BlockKey
from worker.tiers.opening import TierSettings, contents_of
from worker.tiers.store import TierStore

BLOCK_BYTES = 4 * LAYOUT.token_bytes
POOL = BlockPool(4, 4)


def settings(folder: Path | None, secret: bytes | None = None) -> TierSettings:
    return TierSettings(
        host_bytes=2 * BLOCK_BYTES,
        disk=folder,
        disk_bytes=0 if folder is None else 10 * BLOCK_BYTES,
        owner="decode-3",
        model=("a/b", "cpu"),
        context_tokens=64,
        secret=secret,
        clock=lambda: 0.0,
    )


def opened(chosen: TierSettings, cache: HashKVCache | None = None) -> TierStore:
    store = chosen.open(cache or HashKVCache(4, 4), POOL)
    assert store is not None
    return store


def folders(root: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("kv"))


def test_folders_are_named_for_the_model_and_the_worker(tmp_path: Path) -> None:
    first = settings(tmp_path)
    kinds = [
        first,
        replace(first, model=("a/b", "gpu")),
        replace(first, model=("c", "cpu")),
        replace(first, owner="decode-4"),
    ]
    for chosen in kinds:
        opened(chosen).close(5.0)
    opened(first, HashKVCache(4, 8)).close(5.0)
    names = folders(tmp_path)
    assert len(names) == 5
    assert all(name.startswith(("a_b-", "c-")) for name in names)
    assert all(name.endswith(("/decode-3", "/decode-4")) for name in names)


def test_a_folder_in_use_or_unusable_costs_the_disk_only(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    first = opened(settings(tmp_path / "kv"))
    for folder in (tmp_path / "kv", file):
        with capture_logs() as logs:
            store = opened(settings(folder))
        assert store.disk is None and [log["event"] for log in logs] == [
            "blocks are not kept on disk"
        ]
        store.close(5.0)
    first.close(5.0)


def test_a_disk_that_fails_at_the_start_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Disk) -> Iterator[tuple[Slot, BlockKey]]:
        yield Slot(0, bytes(12)), chain(1)[0]
        raise OSError(EIO, "Input/output error")

    monkeypatch.setattr(Disk, "scan", failing)
    pool = BlockPool(4, 4)
    store = settings(tmp_path).open(HashKVCache(4, 4), pool)
    assert store is not None and store.disk is None and pool.journal.read() == ((), {})
    store.close(5.0)


def test_a_model_with_windows_or_states_has_no_tiers(tmp_path: Path) -> None:
    with capture_logs() as logs:
        cache = HashKVCache(4, 4, MIXED, 4, 4)
        assert settings(tmp_path).open(cache, POOL) is None
    assert "sliding windows" in logs[0]["event"] and not folders(tmp_path)


def test_room_for_less_than_a_block_is_refused(tmp_path: Path) -> None:
    small = replace(settings(None), host_bytes=BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match=f"--host-kv-bytes is {BLOCK_BYTES - 1}, and one block"):
        opened(small)
    small = replace(settings(tmp_path), disk_bytes=5)
    with pytest.raises(ValueError, match="--disk-kv-bytes is 5, and one block takes"):
        opened(small)


def test_other_weights_have_other_contents(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    os.utime(file, (1, 1))
    before = contents_of([file])
    assert contents_of([file]) == before
    os.utime(file, (2, 2))
    assert contents_of([file]) != before
    os.utime(file, (1, 1))
    with file.open("r+b") as content:
        content.seek(50_000)
        content.write(bytes([1]) * 1000)
    os.utime(file, (1, 1))
    assert contents_of([file]) != before, "the same name, size and time"
    with pytest.raises(OSError, match="No such file"):
        contents_of([tmp_path / "nothing"])
