"""Bodies that come compressed: gzip and deflate, inflated a step at a time.

A kilobyte may inflate to a megabyte, and a megabyte to a gigabyte: who reads asks for one step
after the other, and stops when there is too much.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from router.api.errors import HttpError
from wire.errors import shown

# Inflated in one step: some hundred microseconds.
STEP_BYTES: Final = 1 << 16
# The formats by their names in Content-Encoding, as zlib wants them told.
_FORMATS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Inflation:
    """One body, in the format that its Content-Encoding names.

    Raises:
        HttpError: 415; it names none of ours.
    """

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
        """Inflate what came next, at most STEP_BYTES at a time.

        Raises:
            HttpError: 400; it is not in the format, or there is more after its end.
        """
        while True:
            try:
                step = self._stream.decompress(chunk, STEP_BYTES)
            except zlib.error:
                raise self._broken("is no") from None
            yield step
            chunk = self._stream.unconsumed_tail
            if self._stream.unused_data:
                # Another stream may follow in a gzip file: thousands of empty ones cost us much
                # and whoever sends them nothing.
                raise self._broken("has more after the end of its")
            if not chunk and len(step) < STEP_BYTES:
                return

    def end(self) -> None:
        """No more comes.

        Raises:
            HttpError: 400; it is not whole.
        """
        if not self._stream.eof:
            raise self._broken("ends before the end of its")

    def _broken(self, problem: str) -> HttpError:
        return HttpError(400, f"the body {problem} {self._name} stream", code="invalid_encoding")
