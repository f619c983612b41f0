"""The families of tool-call syntax by name, and their detection from a chat template.

To add a family, write a module here that parses its calls (`read`, a generator over a `Scan`),
returns a grammar for them (`grammar`) and recognizes its chat templates (`matches`).  Add a row to
`FAMILIES`, and example texts to `tests/router/text/texts.py`, which tests every way to split them.
"""

from __future__ import annotations

from typing import Final, Protocol

from router.text.scan import Scan, Steps
from router.text.tools import hermes, llama, mistral, pythonic
from router.text.tools.lark import AllowedCalls


class Family(Protocol):
    """A module that implements one syntax of tool calls."""

    @property
    def MARKS(self) -> tuple[str, ...]:
        """The marks around calls; special tokens among them must be decoded to text."""

    def read(self, scan: Scan, /) -> Steps[None]: ...
    def grammar(self, allowed: AllowedCalls, /) -> str: ...
    def matches(self, template: str, /) -> bool: ...


# In the order of detection: templates of an earlier family may also match a later one.
FAMILIES: Final[dict[str, Family]] = {
    "hermes": hermes,
    "mistral": mistral,
    "pythonic": pythonic,
    "llama3_json": llama,
    "llama4_json": llama,
    "llama4_pythonic": pythonic,
}


def detect(template: str) -> Family | None:
    return next((family for family in FAMILIES.values() if family.matches(template)), None)
