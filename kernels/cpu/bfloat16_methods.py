"""The three methods of multiplying bfloat16, and the choice for this processor."""

from __future__ import annotations

from enum import IntEnum

from kernels.cpu import amx, dot_bfloat16


class Way(IntEnum):
    """A method of multiplying bfloat16; the last that is available is the fastest.

    Each method adds in a fixed order: tiles and vectors in the same order, dots in another.
    """

    VECTORS = 0  # float32 vectors, on any processor: `kernels.cpu.simd.pair_product`
    DOTS = 1  # `kernels.cpu.dot_bfloat16`
    TILES = 2  # `kernels.cpu.amx`


def known_ways() -> list[Way]:
    """Return the methods that this processor has and the system permits."""
    return [
        Way.VECTORS,
        *([Way.DOTS] if dot_bfloat16.available() else []),
        *([Way.TILES] if amx.available() else []),
    ]


def best_way() -> Way:
    """Return the default method of this processor."""
    return known_ways()[-1]


def known_way(way: Way | None) -> Way:
    """Return a method, which must be one of `known_ways`, or `best_way` for None."""
    assert way is None or way in known_ways(), f"this processor does not multiply by {way!r}"
    return best_way() if way is None else way
