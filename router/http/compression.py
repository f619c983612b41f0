"""Decompression of request bodies (gzip, deflate) in steps, since a megabyte may inflate to a
gigabyte: the reader stops when there is too much."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from router.api.errors import HttpError
from wire.errors import shown

# Inflated in one step: some hundred microseconds.
STEP_BYTES: Final = 1 << 16
# The wbits of zlib by the name in Content-Encoding.
_FORMATS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Inflation:
    """One body in the format of its Content-Encoding.  Raises HttpError 415."""

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower().removeprefix("x-")
        if name not in _FORMATS:
            ours = ", ".join(_FORMATS)
            raise HttpError(
                415,
                f"the Content-Encoding {shown(encoding)} is not taken here: send the body with one "
                f"of {ours}, or uncompressed",
                code="unsupported_media_type",
                headers=((b"accept-encoding", ours.encode()),),
            )
        self._stream = zlib.decompressobj(_FORMATS[name])
        self._name = name

    def steps(self, chunk: bytes) -> Iterator[bytes]:
        """Inflate the next bytes, at most STEP_BYTES at a time.  Raises HttpError 400."""
        while True:
            try:
                step = self._stream.decompress(chunk, STEP_BYTES)
            except zlib.error:
                raise self._broken("is no") from None
            yield step
            chunk = self._stream.unconsumed_tail
            if self._stream.unused_data:
                # A gzip file may hold several streams: thousands of empty ones would cost the
                # sender nothing.
                raise self._broken("has more after the end of its")
            if not chunk and len(step) < STEP_BYTES:
                return

    def end(self) -> None:
        """Check that the body is complete.  Raises HttpError 400."""
        if not self._stream.eof:
            raise self._broken("ends before the end of its")

    def _broken(self, problem: str) -> HttpError:
        return HttpError(400, f"the body {problem} {self._name} stream", code="invalid_encoding")
