"""Bodies of /v1/responses for its tests, and what comes of them."""

from __future__ import annotations

import json
from typing import Any

from router.api.requests.body import parse
from router.api.requests.unsupported_fields import RESPONSES
from router.api.responses.body import ResponseBody

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": None, "strict": None}


def asked(**fields: Any) -> ResponseBody:
    return parse(ResponseBody, json.dumps({"input": "hi"} | fields).encode(), RESPONSES)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each is called what it says it is."""
    found = []
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as a client puts them together: from what was added and the deltas."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in event:
                    part["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                part = items[event["output_index"]]["content"][event["content_index"]]
                assert part["text"] == event["text"]
            case "function_call_arguments.done":
                item = items[event["output_index"]]
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case "content_part.done":
                assert items[event["output_index"]]["content"] == [event["part"]]
            case "output_item.done":
                item = items[event["output_index"]]
                item["status"] = event["item"]["status"]
                assert item == event["item"]
    return items


def without_call_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what differs between two answers that are the same."""
    return [{name: item[name] for name in item if name != "call_id"} for item in items]
