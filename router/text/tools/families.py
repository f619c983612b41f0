"""The families of tool-call syntax, by name, and which of them a chat template speaks.

To add one: a file beside the others that reads its calls (`read`, a generator over a `Scan`), says
them as a grammar (`grammar`) and knows its templates (`speaks`), a row here, and its texts in
`tests/router/text/texts.py`, which has them read in every cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from router.text.scan import Scan, Steps
from router.text.tools import hermes, llama, mistral, pythonic
from router.text.tools.lark import Wanted


class Family(NamedTuple):
    """One syntax of tool calls."""

    read: Callable[[Scan], Steps[None]]
    grammar: Callable[[Wanted], str]
    speaks: Callable[[str], bool]
    # What the model writes around calls; some are special tokens, which have no text otherwise.
    marks: tuple[str, ...]


_HERMES: Final = Family(hermes.read, hermes.grammar, hermes.speaks, (hermes.OPEN, hermes.CLOSE))
_MISTRAL: Final = Family(
    mistral.read, mistral.grammar, mistral.speaks, (mistral.MARK, mistral.ARGS, mistral.CALL_ID)
)
_PYTHONIC: Final = Family(
    pythonic.read, pythonic.grammar, pythonic.speaks, (pythonic.OPEN, pythonic.CLOSE)
)
_LLAMA: Final = Family(llama.read, llama.grammar, llama.speaks, llama.MARKS)

# In the order in which a template is asked: what follows may be met in those before, too.
FAMILIES: Final = {
    "hermes": _HERMES,
    "mistral": _MISTRAL,
    "pythonic": _PYTHONIC,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
}


def detect(template: str) -> Family | None:
    return next((family for family in FAMILIES.values() if family.speaks(template)), None)
