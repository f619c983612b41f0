"""Puts the page together: one HTML document that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

# In this order: each script may use the names of those before it.
SCRIPTS: Final = ("shared", "stream", "charts", "cluster", "requests", "playground", "main")
_POLICY: Final = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def document() -> tuple[bytes, bytes]:
    """Return the page, and its Content-Security-Policy, by which only its own script runs."""
    folder = files(__package__)
    style = folder.joinpath("page.css").read_text("utf-8")
    script = "".join(folder.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    html = folder.joinpath("index.html").read_text("utf-8")
    html = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    return html.encode(), _POLICY.format(script=_hash(script), style=_hash(style)).encode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
