"""Checks a program's arguments as strictly as frames of a peer.

Neither msgspec nor the engine checks an object that Python code constructs.  With a wrong value in
it a step could raise, which ends all requests, or change the text of another request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Integral, Real
from operator import index
from typing import Any, Final

import msgspec

from wire.options import Options

# Where msgspec found the fault: "... - at `$.logit_bias[0][0]`".
_FIELD: Final = re.compile(r"`\$\.(\w+)")


def checked_ids(token_ids: Iterable[int]) -> list[int]:
    """Return the ids as plain integers; those of NumPy and torch are integers too.

    Whether the model has such tokens is not asked here.

    Raises:
        TypeError: One is not an integer, or they are no sequence; the message says which.
    """
    ids: list[int] = []
    for token_id in token_ids:
        try:
            ids.append(index(token_id))
        except TypeError:
            place = f"token_ids[{len(ids)}]"
            raise TypeError(f"{place} is {token_id!r:.80}, not an integer") from None
    return ids


def checked_options(options: Options | None) -> Options:
    """Return the options as they would come over the wire; None means every default.

    Raises:
        TypeError: They are no `Options`.
        ValueError: A field is not of its type or not in its range; the message has all three.
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
    """Return a NumPy number as one of Python; of anything else its repr, for the error message."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else repr(value)
