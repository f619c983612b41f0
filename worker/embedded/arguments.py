"""Checks a program's arguments as strictly as frames of a peer.

With a wrong value a step could raise, which ends all requests, or change another request's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Integral, Real
from operator import index
from typing import Any, Final

import msgspec

from wire.options import Options

# In a message of msgspec: "... - at `$.logit_bias[0][0]`".
_FIELD: Final = re.compile(r"`\$\.(\w+)")


def checked_ids(token_ids: Iterable[int]) -> list[int]:
    """Return the ids, perhaps of NumPy or torch, as plain integers.  Raises TypeError."""
    ids: list[int] = []
    for token_id in token_ids:
        try:
            ids.append(index(token_id))
        except TypeError:
            place = f"token_ids[{len(ids)}]"
            raise TypeError(f"{place} is {token_id!r:.80}, not an integer") from None
    return ids


def checked_options(options: Options | None) -> Options:
    """Return the options as if decoded from a frame; None is the defaults.

    Raises:
        TypeError: They are no `Options`.
        ValueError: A field has a wrong type or is out of range; the message names all three.
    """
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise TypeError(f"options are {options!r:.80}, not wire.options.Options")
    try:
        return msgspec.convert(msgspec.to_builtins(options, enc_hook=_plain), Options)
    except msgspec.ValidationError as error:
        where = _FIELD.search(str(error))
        name = where[1] if where else "options"
        value = getattr(options, name, options)
        raise ValueError(f"{name} is {value!r:.80}: {error}") from error


def _plain(value: Any) -> object:
    """Convert a number of NumPy; return the repr of anything else, for the error message."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else repr(value)
