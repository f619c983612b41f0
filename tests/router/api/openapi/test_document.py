"""The description is valid OpenAPI, and says of fields what the bodies take."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from router.api.openapi.document import document
from router.api.openapi.operations import OPERATIONS

DOCUMENT: Any = json.loads(json.dumps(document()))


def schema_of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def test_every_reference_leads_somewhere() -> None:
    names = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(DOCUMENT)))
    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert names and names <= known


@pytest.mark.parametrize("name", DOCUMENT["components"]["schemas"])
def test_every_type_is_a_json_schema_of_any_language(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(name))
    assert r"\\Z" not in json.dumps(DOCUMENT["components"]["schemas"][name])


def test_examples_are_of_their_types() -> None:
    for operation in OPERATIONS:
        if operation.body is not None:
            described = DOCUMENT["paths"][operation.path][operation.method]
            content = described["requestBody"]["content"]["application/json"]
            validator = jsonschema.Draft202012Validator(schema_of(operation.body.__name__))
            validator.validate(content["example"])
            with pytest.raises(jsonschema.ValidationError):
                validator.validate([])


def test_ranges_names_and_keys() -> None:
    fields = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    paths = DOCUMENT["paths"]
    items = paths["/v1/responses/{response}/input_items"]["get"]["parameters"]
    assert [(each["in"], each["name"]) for each in items] == [
        ("path", "response"),
        ("query", "after"),
        ("query", "limit"),
        ("query", "order"),
    ]
    assert paths["/livez"]["get"]["security"] == [] and "security" not in paths["/load"]["get"]
    stream = paths["/v1/messages"]["post"]["responses"]["200"]["content"]
    assert list(stream) == ["application/json", "text/event-stream"]
    unready = paths["/ping"]["post"]["responses"]["503"]["content"]["application/json"]["schema"]
    assert len(unready["anyOf"]) == 2
