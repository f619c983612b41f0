"""Generates the OpenAPI 3.1 document from the types that parse request bodies.

The document is the same for every router, so it reveals nothing about this one's settings.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from router.api.openapi.operations import OPERATIONS, STATUSES, Operation

# The version of the API, not of the release.
VERSION: Final = "1"
ABOUT: Final = (
    "The OpenAI API, Anthropic's messages, and what one can ask the router about itself. A field "
    "that is null has its default. A number may come as text. What is wrong with a request beyond "
    "these types, such as fields that exclude each other, is answered 400 and named."
)
EVENTS: Final = "text/event-stream"
# The schema of an event of a stream.
EVENT: Final = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_COMPONENTS: Final = "#/components/schemas/"


def document() -> dict[str, Any]:
    kinds = [kind for operation in OPERATIONS for kind in _kinds(operation)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_COMPONENTS + "{name}")
    known = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, known)
    keys = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": VERSION, "description": ABOUT},
        # A router without API keys accepts requests without one.
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {"schemas": _portable(components), "securitySchemes": {"key": keys}},
    }


def _kinds(operation: Operation) -> list[Any]:
    kinds = (operation.answer, operation.body, operation.refusal, operation.unready)
    return [kind for kind in (*kinds, operation.query) if isinstance(kind, type)]


def _described(operation: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if operation.answer is not None:
        responses["200"] = {"description": "The answer.", "content": _answer(operation, known)}
    for status in operation.refusals:
        schema = known[operation.refusal]
        if status == 503 and operation.unready is not None:
            schema = {"anyOf": [schema, known[operation.unready]]}
        responses[str(status)] = {"description": STATUSES[status], "content": _content(schema)}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.is_open:
        described["security"] = []
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"schema": known[operation.body], "example": operation.example}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _answer(operation: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {operation.answer: {"schema": {"type": "string"}}}
    content = _content(known[operation.answer])
    return content | {EVENTS: {"schema": EVENT}} if operation.is_streamed else content


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    named = operation.path.partition("{")[2].partition("}")[0]
    parameters: list[dict[str, Any]] = []
    if named:
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": named, "in": "path", "required": True, "schema": schema})
    if operation.query is not None:
        fields = msgspec.json.schema(operation.query)["$defs"][operation.query.__name__]
        parameters += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in fields["properties"].items()
        ]
    return parameters


def _portable(schema: Any) -> Any:
    """Return a copy of a schema with Python's `\\Z` replaced by `$` in its patterns."""
    if isinstance(schema, list):
        return [_portable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _portable(each) for name, each in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str):
        changed["pattern"] = pattern.replace(r"\Z", "$")
    return changed
