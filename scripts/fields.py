#!/usr/bin/env python3
"""Write router/FIELDS.md, the effect of every request field, or compare it with --check.

usage: .venv/bin/python scripts/fields.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
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
        names = ", ".join(f"`{field}`" for field in sorted(fields.that_work(body)))
        parts.append(f"| {name} | {names} |")
    parts += ["\n## Are refused\n", "| field | where | but for | why |\n|---|---|---|---|"]
    for name, where, (why, neutral) in rows("refused"):
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        parts.append(f"| `{name}` | {where} | {values} | {why} |")
    parts += ["\n## Are without effect on the answer\n", "| field | where | why |\n|---|---|---|"]
    parts += [f"| `{name}` | {where} | {why} |" for name, where, why in rows("without_effect")]
    return "\n".join(parts) + "\n"


def rows(kind: str) -> list[tuple[str, str, Any]]:
    """Return each field of a kind, the endpoints that have it, and its description."""
    descriptions: dict[str, Any] = {}
    where: dict[str, list[str]] = {}
    for endpoint, (_, fields) in ENDPOINTS.items():
        for name, description in getattr(fields, kind).items():
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
