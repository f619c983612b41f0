"""The events of a message, and the message that they make."""

from __future__ import annotations

import json
from typing import Any

import jiter


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The documents of a stream; each event has the name that its document says."""
    found = []
    for each in body.decode().split("\n\n"):
        if each and not each.startswith(":"):
            name, _, data = each.partition("\n")
            document = json.loads(data.removeprefix("data: "))
            assert name == f"event: {document['type']}"
            found.append(document)
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a strict client assembles from events in order."""
    first, *others, last = events
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == []
    is_open = False
    written = ""
    for event in others:
        kind, content = event["type"], message["content"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append(event["content_block"])
            is_open, written = True, ""
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(content) - 1
            name, text = sorted(set(event["delta"]) - {"type"})[0], list(event["delta"].values())[1]
            if name == "partial_json":
                written += text
                content[-1]["input"] = jiter.from_json(written.encode(), partial_mode=True)
            else:
                content[-1][name] += text
        elif kind == "content_block_stop":
            assert is_open and event["index"] == len(content) - 1
            is_open = False
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"] | {"usage": event["usage"]}
        else:
            assert kind == "ping"
    return dict(message)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The same message with the ids of its calls left out, which are new each time."""
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return message
