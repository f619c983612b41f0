"""A record opens as what it was packed as, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.tiers.chains import chain
from worker.tiers.records import Checksum, Encryption, RecordFormat, Seal

KEYS = chain(1, 2, block_size=2)
KV = bytes(range(10))
SECRET = b"s" * 40


def format_of(seal: Seal, identity: bytes = b"model") -> RecordFormat:
    return RecordFormat(2, len(KV), identity, seal)


SEALS = {"checksum": Checksum(), "encryption": Encryption(SECRET)}


@pytest.fixture(params=SEALS)
def record(request: pytest.FixtureRequest) -> RecordFormat:
    return format_of(SEALS[request.param])


def test_a_record_opens(record: RecordFormat) -> None:
    for key in KEYS:
        nonce = record.new_nonce()
        header, kv = record.pack_header(nonce, key), b"".join(record.pack_kv(nonce, key, KV))
        assert (len(header), len(kv)) == (record.header_bytes, record.kv_bytes)
        assert record.open_header(header) == (nonce, key)
        assert record.open_kv(nonce, key, kv) == KV


@pytest.mark.parametrize("name", SEALS)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_bit_may_differ(name: str, place: int, bit: int) -> None:
    record, key = format_of(SEALS[name]), KEYS[1]
    nonce = record.new_nonce()
    header = bytearray(record.pack_header(nonce, key))
    kv = bytearray(b"".join(record.pack_kv(nonce, key, KV)))
    header[place % len(header)] ^= 1 << bit
    kv[place % len(kv)] ^= 1 << bit
    assert record.open_header(header) is None
    assert record.open_kv(nonce, key, kv) is None


def test_what_belongs_elsewhere_does_not_open(record: RecordFormat) -> None:
    nonce, other_nonce = record.new_nonce(), record.new_nonce()
    kv = b"".join(record.pack_kv(nonce, KEYS[0], KV))
    assert record.open_kv(other_nonce, KEYS[0], kv) is None, "of an older record in this place"
    assert record.open_kv(nonce, KEYS[1], kv) is None, "of another block"
    foreign = format_of(SEALS["checksum"], b"another model")
    assert foreign.open_header(record.pack_header(nonce, KEYS[0])) is None


def test_an_encrypted_record_shows_nothing_and_needs_the_key() -> None:
    record = format_of(Encryption(SECRET))
    nonce = record.new_nonce()
    header, kv = record.pack_header(nonce, KEYS[0]), b"".join(record.pack_kv(nonce, KEYS[0], KV))
    assert KEYS[0].tokens not in header and KV[:4] not in kv
    for seal in (Checksum(), Encryption(b"t" * 40)):
        other = format_of(seal)
        assert other.open_header(header) is None and other.open_kv(nonce, KEYS[0], kv) is None


def test_a_nonce_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record = format_of(Checksum())
    nonces = [record.new_nonce() for _ in range(9)]
    monkeypatch.setattr(record, "_numbers", iter([(1 << 32) - 2, 1 << 32]))  # the last ones
    nonces += [record.new_nonce() for _ in range(4)]
    assert len(set(nonces)) == len(nonces)
    assert all(nonce[8] % 2 == 0 for nonce in nonces), "odd ones are for the KV"


def test_the_derived_key_stays_the_same() -> None:
    """The derived key must not change from release to release, or files would be lost."""
    first = Encryption(SECRET).close(bytes(12), b"data", b"bound")
    assert b"".join(first).hex() == "b93317266f420664ec2d0dab1eb891988b3d541b"
