"""Decompresses request bodies (gzip, deflate) in steps.

A megabyte may decompress to a gigabyte, so the reader checks the size after each step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from router.api.errors import HttpError
from wire.errors import shown

# The most bytes to decompress in one step, which takes some hundred microseconds.
STEP_BYTES: Final = 1 << 16
# The `wbits` argument of zlib, by the name in Content-Encoding.
_FORMATS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Inflation:
    """Decompresses one body.  Raises HttpError 415 for an unknown Content-Encoding."""

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower().removeprefix("x-")
        if name not in _FORMATS:
            names = ", ".join(_FORMATS)
            raise HttpError(
                415,
                f"the Content-Encoding {shown(encoding)} is not taken here: send the body with one "
                f"of {names}, or uncompressed",
                code="unsupported_media_type",
                headers=((b"accept-encoding", names.encode()),),
            )
        self._stream = zlib.decompressobj(_FORMATS[name])
        self._name = name

    def steps(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress a chunk, yielding at most STEP_BYTES at a time.  Raises HttpError 400."""
        while True:
            try:
                step = self._stream.decompress(chunk, STEP_BYTES)
            except zlib.error:
                raise self._broken("is no") from None
            yield step
            chunk = self._stream.unconsumed_tail
            if self._stream.unused_data:
                # A gzip file may contain several streams, but thousands of empty ones would be a
                # cheap attack, so accept only one.
                raise self._broken("has more after the end of its")
            if not chunk and len(step) < STEP_BYTES:
                return

    def end(self) -> None:
        """Check that the compressed stream is complete.  Raises HttpError 400."""
        if not self._stream.eof:
            raise self._broken("ends before the end of its")

    def _broken(self, problem: str) -> HttpError:
        return HttpError(400, f"the body {problem} {self._name} stream", code="invalid_encoding")
