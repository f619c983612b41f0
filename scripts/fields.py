#!/usr/bin/env python3
"""Write router/FIELDS.md, the effect of every request field, or compare it with --check.

usage: .venv/bin/python scripts/fields.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec import Struct

from router.api.chat import ChatBody
from router.api.requests.unsupported_fields import CHAT, COMPLETIONS, RESPONSES, TOKENIZE, Fields
from router.api.responses.body import ResponseBody
from router.api.text import CompletionBody
from router.api.tokenize import TokenizeBody

WRITTEN: Final = Path(__file__).resolve().parent.parent / "router" / "FIELDS.md"
ENDPOINTS: Final[dict[str, tuple[type[Struct], Fields]]] = {
    "completions": (CompletionBody, COMPLETIONS),
    "chat": (ChatBody, CHAT),
    "responses": (ResponseBody, RESPONSES),
    "tokenize": (TokenizeBody, TOKENIZE),
}
# Fields that are ignored, by endpoint, and why they have no effect on the answer.
_SHARED: Final = {
    "user": "nothing is kept of who asked",
    "session_id": "requests go where their prefix is cached, whatever session they are of",
    "length_penalty": "only beam search has one",
    "early_stopping": "only beam search has it",
    "spaces_between_special_tokens": "no spaces are put between tokens",
    "guided_decoding_backend": "there is one",
    "stream_interval": "streams have a chunk for every token",
    "return_token_offsets": "only of vLLM's endpoints that render prompts",
    "mm_payload": "only of vLLM's endpoints that render prompts",
    "return_mm_kwargs": "only of vLLM's endpoints that render prompts",
}
WITHOUT_EFFECT: Final[dict[str, dict[str, str]]] = {
    "completions": _SHARED,
    "chat": {
        **_SHARED,
        "metadata": "nothing is kept of a request",
        "store": "nothing is kept of a request",
        "safety_identifier": "nothing is kept of who asked",
        "service_tier": "there is one; priority says who is served first",
        "prompt_cache_key": "prefixes are cached by themselves",
        "prompt_cache_options": "prefixes are cached by themselves",
        "prompt_cache_retention": "prefixes are cached as long as there is room",
        "prediction": "it makes answers quicker, not other ones",
    },
    "responses": {
        # The response repeats "user".
        **{name: why for name, why in _SHARED.items() if name != "user"},
        "prompt_cache_options": "prefixes are cached by themselves",
        "prompt_cache_retention": "prefixes are cached as long as there is room",
        "service_tier": "there is one; priority says who is served first",
        "max_tool_calls": "it counts calls of built-in tools, and there are none",
    },
    "tokenize": {},
}
HEAD: Final = """\
# Fields of a request

What becomes of every field that OpenAI's schema or vLLM's server has for `/v1/completions`,
`/v1/chat/completions`, `/v1/responses` and `/tokenize`. A value out of range is refused with the
field's name and the range; `null` is the default; a name that nobody knows is ignored.
`scripts/fields.py` writes this file from the code, and a test compares.
"""


def document() -> str:
    parts = [HEAD, "## Work\n", "| endpoint | fields |\n|---|---|"]
    for name, (body, fields) in ENDPOINTS.items():
        names = ", ".join(f"`{field}`" for field in sorted(working(body, fields)))
        parts.append(f"| {name} | {names} |")
    parts += ["\n## Are refused\n", "| field | where | but for | why |\n|---|---|---|---|"]
    refused = {endpoint: fields.refused for endpoint, (_, fields) in ENDPOINTS.items()}
    for name, where, (why, neutral) in rows(refused):
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        parts.append(f"| `{name}` | {where} | {values} | {why} |")
    parts += ["\n## Are without effect on the answer\n", "| field | where | why |\n|---|---|---|"]
    parts += [f"| `{name}` | {where} | {why} |" for name, where, why in rows(WITHOUT_EFFECT)]
    return "\n".join(parts) + "\n"


def working(body: type[Struct], fields: Fields) -> set[str]:
    """Return the supported fields of a body; it may inherit fields that are refused."""
    return set(body.__struct_fields__) - fields.refused.keys()


def rows(of_endpoints: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    """Return each field, the endpoints that have it, and its description."""
    descriptions: dict[str, Any] = {}
    where: dict[str, list[str]] = {}
    for endpoint, fields in of_endpoints.items():
        for name, description in fields.items():
            descriptions[name] = description
            where.setdefault(name, []).append(endpoint)
    return [(name, ", ".join(where[name]), descriptions[name]) for name in sorted(descriptions)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if parser.parse_args().check:
        if WRITTEN.read_text() == document():
            return 0
        print(f"{WRITTEN} is not what the code says: run scripts/fields.py", file=sys.stderr)
        return 1
    WRITTEN.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
