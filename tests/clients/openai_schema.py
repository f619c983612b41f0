"""Bodies and events against the public description of the OpenAI API.

`tests/system/openai_schema.json` is an excerpt of it; its head says of which version.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import httpx
from jsonschema import Draft202012Validator

from tests.cluster import ROOT

_SCHEMA: Final = json.loads((ROOT / "tests" / "system" / "openai_schema.json").read_text())
_EVENTS: Final = [
    one["$ref"].rpartition("/")[2] for one in _SCHEMA["$defs"]["ResponseStreamEvent"]["anyOf"]
]


@cache
def validator(kind: str) -> Draft202012Validator:
    """The validator of a kind of body or event; made once, for the description is large."""
    return Draft202012Validator({**_SCHEMA, "$ref": f"#/$defs/{kind}"})


def validate(kind: str, body: Any) -> None:
    """Raise where `body` is not what the description says of `kind`."""
    validator(kind).validate(body)


def validate_event(event: Any) -> None:
    """The same of one event of a streamed response, by the kind it says it is."""
    types = {name: _SCHEMA["$defs"][name]["properties"]["type"].get("enum", []) for name in _EVENTS}
    (kind,) = [name for name, values in types.items() if event["type"] in values]
    validate(kind, event)


def events_of(response: httpx.Response) -> list[Any]:
    """The objects of a stream of server-sent events, without the end marker."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    said = [line.removeprefix("data: ") for line in lines]
    return [json.loads(line) for line in said if line != "[DONE]"]
