"""The arguments of a call as an object, also where the answer ended in the middle of them."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_TOKEN: Final = re.compile(
    r'[\s,]*+(?:(?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+"(?P<colon>\s*+:)?)'
    r'|(?P<open>[{\[])|(?P<close>[}\]])|(?P<scalar>[^\s"{}\[\],:]++))',
    re.DOTALL,
)


def read_arguments(text: str) -> dict[str, Any]:
    """Return what JSON text says: of a text that is cut short the values that are complete.

    It is what clients make of a stream that ends there.  Text that is no JSON says nothing.
    """
    for each in (text, _closed(text)):
        try:
            read = msgspec.json.decode(each)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            continue
        return read if isinstance(read, dict) else {}
    return {}


def _closed(text: str) -> str:
    """Return the beginning of a JSON text, up to the last complete value, with brackets closed."""
    closing: list[str] = []
    end = position = 0
    is_key = False
    while token := _TOKEN.match(text, position):
        position = token.end()
        follows_key, is_key = is_key, token["colon"] is not None
        if token["open"]:
            closing.append("}" if token["open"] == "{" else "]")
        elif token["close"]:
            del closing[-1:]
        elif is_key or (position == len(text) and not _is_whole(token)):
            continue
        elif closing[-1:] == ["}"] and not follows_key:
            continue  # a key without its colon
        end = position
    return text[:end] + "".join(reversed(closing))


def _is_whole(token: re.Match[str]) -> bool:
    """Whether the last value of a text needs no more characters."""
    try:
        msgspec.json.decode(token["text"] or token["scalar"])
    except msgspec.DecodeError:
        return False
    return True
