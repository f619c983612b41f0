"""The families of tool-call syntax, by name, and which of them a chat template speaks.

To add one: a file beside the others that reads its calls (`read`, a generator over a `Scan`), says
them as a grammar (`grammar`) and knows its templates (`speaks`), a row here, and its texts in
`tests/router/text/texts.py`, which has them read in every cut.
"""

from __future__ import annotations

from typing import Final, Protocol

from router.text.scan import Scan, Steps
from router.text.tools import hermes, llama, mistral, pythonic
from router.text.tools.lark import Wanted


class Family(Protocol):
    """One syntax of tool calls: a module."""

    @property
    def MARKS(self) -> tuple[str, ...]:
        """Texts around calls; some are special tokens, which have no text otherwise."""

    def read(self, scan: Scan, /) -> Steps[None]: ...
    def grammar(self, wanted: Wanted, /) -> str: ...
    def speaks(self, template: str, /) -> bool: ...


# In the order in which a template is asked: what follows may be met in those before, too.
FAMILIES: Final[dict[str, Family]] = {
    "hermes": hermes,
    "mistral": mistral,
    "pythonic": pythonic,
    "llama3_json": llama,
    "llama4_json": llama,
    "llama4_pythonic": pythonic,
}


def detect(template: str) -> Family | None:
    return next((family for family in FAMILIES.values() if family.speaks(template)), None)
