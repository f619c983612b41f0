"""Compressed bodies are inflated whatever their cuts, step by step, and nothing else is taken."""

from __future__ import annotations

import gzip
import itertools
import random
import zlib

import pytest

from router.api.errors import HttpError
from router.http.compression import STEP_BYTES, Inflation

TEXT = bytes(random.Random(0).choices(b"abcdefgh", k=STEP_BYTES * 2 + 7))


def cut(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def inflated(encoding: str, *chunks: bytes) -> bytes:
    inflation = Inflation(encoding)
    steps = [step for chunk in chunks for step in inflation.steps(chunk)]
    inflation.end()
    assert max(map(len, steps), default=0) <= STEP_BYTES
    return b"".join(steps)


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", " deflate "])
@pytest.mark.parametrize("text", [TEXT, TEXT[:STEP_BYTES], TEXT[: STEP_BYTES * 2], b"{}", b""])
def test_chunks_never_matter(encoding: str, text: bytes) -> None:
    raw = zlib.compress(text) if "deflate" in encoding else gzip.compress(text)
    assert inflated(encoding, raw) == text
    for size in (1, 1000):
        assert inflated(encoding, *cut(raw, size)) == text


def test_a_bomb_is_inflated_as_far_as_somebody_asks() -> None:
    steps = Inflation("gzip").steps(gzip.compress(bytes(64 << 20)))
    assert [len(step) for step in itertools.islice(steps, 3)] == [STEP_BYTES] * 3


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "identity", "", "x" * 10_000])
def test_others_are_refused_with_ours(encoding: str) -> None:
    with pytest.raises(HttpError) as caught:
        Inflation(encoding)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
    assert caught.value.headers == ((b"accept-encoding", b"gzip, deflate"),)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"prompt": "x"}', "is no gzip stream"),
        (zlib.compress(TEXT), "is no gzip stream"),
        (gzip.compress(TEXT)[:-1], "ends before the end of its gzip stream"),
        (b"", "ends before the end of its gzip stream"),
        (gzip.compress(TEXT)[:-8] + bytes(8), "is no gzip stream"),
        (gzip.compress(TEXT) + b"\0", "has more after the end of its gzip stream"),
        (gzip.compress(b"") * 1000, "has more after the end of its gzip stream"),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_broken_streams_are_refused(raw: bytes, said: str, size: int) -> None:
    with pytest.raises(HttpError, match=said) as caught:
        inflated("gzip", *cut(raw, size))
    assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")
