"""The state of a request as the dispatcher begins it."""

from __future__ import annotations

from router.core.request import Request
from router.core.state import Phase, RequestState, new_tokens
from tests.router.scripted import RecordingSink


def state(request: Request, phase: Phase = Phase.WAITING) -> RequestState:
    return RequestState(
        handle=1,
        request=request,
        sink=RecordingSink(),
        new_tokens=new_tokens(request),
        is_decode_asked=request.max_new_tokens is not None,
        submitted_at=10.0,
        deadline=20.0,
        due=15.0,
        phase=phase,
    )
