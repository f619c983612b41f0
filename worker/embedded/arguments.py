"""Validates the arguments of `ServingEngine` as strictly as frames from the network.

An invalid value could make an engine step raise, which would end all requests, or could change the
output of another request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Integral, Real
from operator import index
from typing import Any, Final

import msgspec

from wire.options import Options

# The field's name in an error message of msgspec: "... - at `$.logit_bias[0][0]`".
_FIELD: Final = re.compile(r"`\$\.(\w+)")


def checked_ids(token_ids: Iterable[int]) -> list[int]:
    """Convert token ids, which may be NumPy or torch scalars, to `int`.  Raises TypeError."""
    ids: list[int] = []
    for token_id in token_ids:
        try:
            ids.append(index(token_id))
        except TypeError:
            name = f"token_ids[{len(ids)}]"
            raise TypeError(f"{name} is {token_id!r:.80}, not an integer") from None
    return ids


def checked_options(options: Options | None) -> Options:
    """Validate options as if they were decoded from a frame; for None return the defaults.

    Raises:
        TypeError: `options` is not an `Options`.
        ValueError: A field has a wrong type or is out of range; the message names the field.
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
    """Convert a NumPy scalar to a Python number; else return repr(), for the error message."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else repr(value)
