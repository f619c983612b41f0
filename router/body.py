"""The body of an HTTP request, which must be plain JSON, small enough and fast enough."""

from __future__ import annotations

import asyncio
from typing import Final

from router import http
from router.call import Call
from router.delivery import Disconnected
from router.http import HttpError

# A body must come at this rate at least, after a grace; slower is an attack or a broken link.
BODY_GRACE_S: Final = 5.0
BODY_BYTES_PER_S: Final = 64 * 1024
CLOSE: Final = (b"connection", b"close")


async def whole(call: Call) -> bytes:
    """Return the body.

    Raises:
        HttpError: 408, 413 or 415.
        Disconnected: The client left before its end.
    """
    http.check_content_type(call.scope)
    begin = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_GRACE_S) as timer:
            # The deadline moves with what has come: a body that trickles ends soon, whatever its
            # size is said to be.
            raw = await http.read_body(
                call.scope,
                call.receive,
                on_bytes=lambda size: timer.reschedule(
                    begin + BODY_GRACE_S + size / BODY_BYTES_PER_S
                ),
            )
    except TimeoutError:
        raise HttpError(
            408, "the body came too slowly", code="body_timeout", headers=(CLOSE,)
        ) from None
    if raw is None:
        raise Disconnected
    return raw
