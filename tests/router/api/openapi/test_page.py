"""The page says what the document says, and a browser need not ask anybody else for it."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pytest

from router.api.openapi.document import document
from router.api.openapi.page import POLICY, page

DOCUMENT = document()
PAGE = page(DOCUMENT)


def test_it_leads_nowhere_else() -> None:
    assert not re.search("<(script|link|img|iframe|form)", PAGE)
    names = re.findall('id="(.*?)"', PAGE)
    assert set(re.findall('(?:href|src)="(.*?)"', PAGE)) - {f"#{name}" for name in names} == {
        "openapi.json"
    }


def test_the_policy_allows_its_style_only() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", PAGE, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest())
    assert b"style-src 'sha256-%b'" % digest in POLICY and b"default-src 'none'" in POLICY


def test_it_has_every_path_and_field() -> None:
    assert all(path in PAGE for path in DOCUMENT["paths"])
    schemas = DOCUMENT["components"]["schemas"]
    assert all(f'<h3 id="{name}">' in PAGE for name in schemas)
    assert "<code>temperature</code><td>number (from 0.0, to 2.0)<td>" in PAGE
    assert "<code>messages</code><td>list of object (at least 1)<td>required" in PAGE


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "any value"),
        ({"type": "string", "minLength": 1, "maxLength": 9}, "string (length from 1, length to 9)"),
        ({"$ref": "#/components/schemas/Tool"}, '<a href="#Tool">Tool</a>'),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "integer or string",
        ),
        ({"enum": ["a", 1, None]}, "&quot;a&quot;, 1, null"),
        ({"type": "array", "maxItems": 4}, "list of any value (at most 4)"),
        ({"type": "array", "items": {"type": "number"}}, "list of number"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "object of string"),
        (
            {"type": "object", "additionalProperties": False, "maxProperties": 2},
            "object (at most 2)",
        ),
    ],
)
def test_what_a_field_takes_is_said_in_words(schema: dict[str, Any], words: str) -> None:
    kind = {"type": "object", "properties": {"field": schema}}
    info = {"title": "", "description": ""}
    shown = page({"info": info, "paths": {}, "components": {"schemas": {"Kind": kind}}})
    assert f"<code>field</code><td>{words}<td>" in shown


def test_whatever_is_in_the_document_is_text_on_the_page() -> None:
    hostile = "<script>alert(1)</script>"
    kind = {"type": "object", "properties": {hostile: {"enum": [hostile]}}, "description": hostile}
    operation = {
        "summary": hostile,
        "responses": {"200": {"description": hostile, "content": {}}},
        "parameters": [{"name": hostile, "in": "query", "schema": {"pattern": hostile}}],
    }
    shown = page(
        {
            "info": {"title": hostile, "description": hostile},
            "paths": {hostile: {"get": operation}},
            "components": {"schemas": {hostile: kind}},
        }
    )
    assert "<script" not in shown and shown.count("&lt;script&gt;") >= 9
