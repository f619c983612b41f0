#!/usr/bin/env python3
"""Write wire/vectors.json, the test vectors of the protocol, or compare it with --check.

`wire` encodes every vector, and the tests read the file as data.  So a change of the code that
changes a byte on the wire also changes this file, and does not go unnoticed.  The cases are defined
in `vector_cases`.

usage: .venv/bin/python scripts/vectors.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.vector_cases.control_plane import control_plane
from scripts.vector_cases.data_plane import data_plane
from scripts.vector_cases.digests import fingerprints, prefixes
from scripts.vector_cases.malformed import malformed
from scripts.vector_cases.session import sessions
from scripts.vector_cases.transfer import transfers
from wire.frames import VERSION

PATH: Final = Path(__file__).resolve().parent.parent / "wire" / "vectors.json"


def vectors() -> dict[str, Any]:
    return {
        "version": VERSION,
        "frames": data_plane() + control_plane(),
        "malformed": malformed(),
        "prefix": prefixes(),
        "fingerprint": fingerprints(),
        "transfer": transfers(),
        "sessions": sessions(),
    }


def render() -> str:
    """Return the text of the file, with one vector per line, so that a diff shows what changed."""
    sections = []
    for name, content in vectors().items():
        if isinstance(content, list):
            lines = ",\n".join("    " + json.dumps(one) for one in content)
            sections.append(f'  "{name}": [\n{lines}\n  ]')
        else:
            sections.append(f'  "{name}": {json.dumps(content)}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if parser.parse_args().check:
        if PATH.read_text() == render():
            return 0
        print("wire/vectors.json is not what the code gives; run scripts/vectors.py and look")
        return 1
    PATH.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
