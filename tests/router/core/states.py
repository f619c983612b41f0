"""The state of a request as the dispatcher creates it."""

from __future__ import annotations

from router.core.request import Request
from router.core.state import Phase, RequestState, new_tokens
from tests.router.scripted import RecordingSink


def state(
    request: Request,
    phase: Phase = Phase.WAITING,
    *,
    handle: int = 1,
    submitted_at: float = 10.0,
    timeout_s: float = 10.0,
) -> RequestState:
    return RequestState(
        handle=handle,
        request=request,
        sink=RecordingSink(),
        new_tokens=new_tokens(request),
        is_decode_asked=request.max_new_tokens is not None,
        submitted_at=submitted_at,
        deadline=submitted_at + timeout_s,
        due=submitted_at + timeout_s / 2,
        phase=phase,
    )
