"""A sealed segment opens in its place, whole and unchanged, with its key, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv import part
from wire.frames import KvCache
from wire.layout import KVLayout
from wire.transfer.sealing import TAG_BYTES, Sealing, new_key
from wire.transfer.segment import SegmentDescriptor

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
FRAME = KvCache(7 << 32 | 1, 3, 5)
HERE = SegmentDescriptor.of(part(LAYOUT, 0, 2, 4, 3), 48, 0)
KEY = bytes(range(32))


@given(kv=st.binary(max_size=100))
def test_a_sealed_segment_opens(kv: bytes) -> None:
    sealed = Sealing(KEY).seal(FRAME, HERE, memoryview(kv))
    assert len(sealed) == len(kv) + TAG_BYTES
    assert Sealing(KEY).open(FRAME, HERE, memoryview(sealed)) == kv


@pytest.mark.parametrize(
    ("frame", "there"),
    [
        (KvCache(7 << 32 | 2, 3, 5), HERE),
        (KvCache(7 << 32 | 1, 4, 5), HERE),
        (KvCache(7 << 32 | 1, 3, 6), HERE),
        *(
            (FRAME, HERE._replace(**{name: getattr(HERE, name) ^ 1}))
            for name in HERE._fields
            if name != "idle_us"
        ),
    ],
)
def test_a_sealed_segment_opens_in_no_other_place(frame: KvCache, there: SegmentDescriptor) -> None:
    sealed = Sealing(KEY).seal(FRAME, HERE, bytes(48))
    assert Sealing(KEY).open(frame, there, sealed) is None


def test_idle_us_is_not_sealed() -> None:
    sealed = Sealing(KEY).seal(FRAME, HERE, bytes(48))
    assert Sealing(KEY).open(FRAME, HERE._replace(idle_us=7), sealed) == bytes(48)


@given(place=st.integers(0, 48 + TAG_BYTES - 1), bit=st.integers(0, 7))
def test_a_changed_byte_is_detected(place: int, bit: int) -> None:
    sealed = bytearray(Sealing(KEY).seal(FRAME, HERE, bytes(range(48))))
    sealed[place] ^= 1 << bit
    assert Sealing(KEY).open(FRAME, HERE, sealed) is None


@pytest.mark.parametrize("kept", [0, 15, 16, 47, 63])
def test_a_truncated_segment_is_refused(kept: int) -> None:
    sealed = Sealing(KEY).seal(FRAME, HERE, bytes(48))
    assert Sealing(KEY).open(FRAME, HERE, sealed[:kept]) is None


def test_keys_are_new_and_another_one_does_not_open() -> None:
    first, second = new_key(), new_key()
    assert first != second
    sealed = Sealing(first).seal(FRAME, HERE, bytes(48))
    assert Sealing(second).open(FRAME, HERE, sealed) is None


def test_a_worker_without_keys_does_not_load_the_cipher() -> None:
    code = "import sys, worker.app; print('cryptography' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"
