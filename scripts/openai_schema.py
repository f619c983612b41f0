"""Write tests/system/openai_schema.json: the parts of the OpenAI API description for tests.

usage: .venv/bin/python scripts/openai_schema.py openapi.yaml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import yaml

WRITTEN: Final = Path(__file__).parent.parent / "tests" / "system" / "openai_schema.json"
ROOTS: Final = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "ErrorResponse",
    "ListModelsResponse",
    "Response",
    "ResponseStreamEvent",
)
# Keywords that do not affect validation.
WORDS: Final = {
    *("description", "example", "examples", "default", "title", "discriminator"),
    *("deprecated", "format", "nullable"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("openapi", type=Path, help="the description, openapi.yaml")
    document = yaml.load(parser.parse_args().openapi.read_text(), Loader=yaml.CSafeLoader)
    schemas: dict[str, Any] = document["components"]["schemas"]
    found: dict[str, Any] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = plain(schemas[name], waiting)
    comment = (
        "Response schemas taken from components/schemas of the OpenAI API description, "
        f"openapi.yaml version {document['info']['version']} of github.com/openai/openai-openapi, "
        "MIT licence. Descriptions, examples and defaults left out, nullable written as a union "
        "with null; otherwise unchanged. Written by scripts/openai_schema.py."
    )
    head = {"$comment": comment, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    definitions = ",\n ".join(lines)
    WRITTEN.write_text(f'{json.dumps(head)[:-1]},\n"$defs": {{\n {definitions}\n}}}}\n')


def plain(node: Any, names: list[str], *, property_names: bool = False) -> Any:
    """Convert a schema to plain JSON Schema, appending the names it refers to to `names`."""
    if isinstance(node, list):
        return [plain(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if property_names:
        return {name: plain(value, names) for name, value in node.items()}
    schema: dict[str, Any] = {}
    if "$ref" in node:  # the other keys do not affect validation
        name = node["$ref"].rpartition("/")[2]
        names.append(name)
        schema["$ref"] = f"#/$defs/{name}"
    else:
        for key, value in node.items():
            if key not in WORDS and not key.startswith("x-"):
                schema[key] = plain(value, names, property_names=key == "properties")
    return {"anyOf": [schema, {"type": "null"}]} if node.get("nullable") else schema


if __name__ == "__main__":
    main()
