"""Frames of server-sent events."""

from __future__ import annotations

from router.api.completions import events


def test_the_frames_of_a_stream() -> None:
    assert events.event(b"{}") == b"data: {}\n\n"
    assert events.event(b"{}", "ping") == b"event: ping\ndata: {}\n\n"
    assert events.PING.startswith(b":") and events.PING.endswith(b"\n\n")
