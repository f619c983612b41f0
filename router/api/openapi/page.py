"""Renders the OpenAPI document as one HTML page, without scripts or external resources."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; \
color: #222; background: #fff }
code { font-size: 0.9em } table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem }
td { border-top: 1px solid #ddd; padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top }
summary { cursor: pointer; padding: 0.3rem 0 } b { display: inline-block; min-width: 4.5rem }
pre { background: #f4f4f4; padding: 0.5rem; overflow: auto }
"""
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest())
# Content-Security-Policy: the page may load nothing and use only its own style.
POLICY: Final = b"default-src 'none'; style-src 'sha256-%b'; frame-ancestors 'none'" % _STYLE_HASH


def page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as an HTML page."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>',
        *("<h2>Paths</h2>", *operations, "<h2>Types</h2>"),
        *(_type(name, schema) for name, schema in schemas.items()),
        "</html>",
    ]
    return "\n".join(parts)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "]
    parts.append(f"{escape(operation['summary'])}</summary>")
    if parameters := operation.get("parameters"):
        rows = [(each["name"], _words(each["schema"]), each["in"]) for each in parameters]
        parts += ["<p>Parameters</p>", _table(rows)]
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]
        parts += ["<p>Body</p>", _table(_contents(content))]
        for each in content.values():
            parts.append(f"<pre>{escape(_shown(each['example']))}</pre>")
    answers = [
        (status, kind, escape(answer["description"]))
        for status, answer in operation["responses"].items()
        for kind in [", ".join([kind for _, kind in _contents(answer["content"])])]
    ]
    return "".join([*parts, "<p>Answers</p>", _table(answers), "</details>"])


def _contents(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(media, _words(each["schema"])) for media, each in content.items()]


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (field, _words(each), "required" if field in required else "")
        for field, each in schema.get("properties", {}).items()
    ]
    description = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{description}</p>{_table(rows)}'


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Render an HTML table; the first column is plain text shown as code, the others are HTML."""
    lines = [
        f"<tr><td><code>{escape(first)}</code>" + "".join([f"<td>{each}" for each in rest])
        for first, *rest in rows
    ]
    return f"<table>{''.join(lines)}</table>"


def _words(schema: Mapping[str, Any]) -> str:
    """Describe the values of a schema in words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join([_words(each) for each in kinds])
    if "enum" in schema:
        return escape(", ".join([_shown(each) for each in schema["enum"]]))
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_words(schema.get('items', {}))}{_limits(schema)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_words(schema['additionalProperties'])}{_limits(schema)}"
    return f"{kind}{_limits(schema)}"


_LIMITS: Final = {
    "minimum": "from",
    "exclusiveMinimum": "over",
    "maximum": "to",
    "minLength": "length from",
    "maxLength": "length to",
    "minItems": "at least",
    "maxItems": "at most",
    "maxProperties": "at most",
    "pattern": "that matches",
}


def _limits(schema: Mapping[str, Any]) -> str:
    limits = [f"{words} {schema[name]}" for name, words in _LIMITS.items() if name in schema]
    return escape(f" ({', '.join(limits)})") if limits else ""


def _shown(value: object) -> str:
    return json.dumps(value)
