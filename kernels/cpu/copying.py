"""Copy memory and hash the copy in one pass: XXH3-64 of each register between load and store.

The copy is not read again soon, so it is written with non-temporal stores: no cache line is fetched
only to be overwritten, and reading, writing and hashing overlap.  Two passes take half as long
again.

Source: the specification of XXH3 for inputs of more than 240 bytes (xxHash, doc/xxhash_spec.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kernels.cpu.intrinsics import instruction, write_prefetch
from kernels.cpu.llvm import I32, I64, i64, load, shuffled, store, vector_of
from kernels.cpu.tasks import CACHE_LINE, record_of
from kernels.cpu.threads import native

Bytes = npt.NDArray[np.uint8]

# A stripe (64 bytes of input) is mixed with 64 bytes of the secret, the next stripe with the 64
# bytes that begin 8 further on.  At the end of the secret a block ends, and the accumulators are
# scrambled.
_STRIPE, _STEP, _SECRET_BYTES = 64, 8, 192
BLOCK_BYTES: Final = (_SECRET_BYTES - _STRIPE) // _STEP * _STRIPE
# Prefetch distance in bytes: the processor's own prefetching stops at the end of a page.
_AHEAD = 4096
_BITS = (1 << 64) - 1
_PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_LAST_PRIME = 0x165667919E3779F9
_FIRST_SUMS = _PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LANES = ir.VectorType(I64, 8)


class _Arguments(NamedTuple):
    source: int
    target: int
    num_blocks: int
    is_last: bool  # the last of these blocks ends the input
    sums: int
    secret: int


def prepare() -> None:
    """Compile the task of `copy`, unless it is compiled already."""
    native(_copy)


def copy(pairs: Sequence[tuple[Bytes, Bytes]], seed: int) -> int | None:
    """Copy each source to its target of the same size; return the digest of all the copies.

    The sources may change meanwhile.  If a target is not whole blocks of `BLOCK_BYTES`, or does not
    begin at a cache line, nothing is copied and None is returned.
    """
    targets = [target for _, target in pairs]
    if not all(len(it) and len(it) % BLOCK_BYTES == 0 == _misplaced(it) for it in targets):
        return None
    secret, sums = _secret_of(seed), np.array(_FIRST_SUMS, np.uint64)
    for index, (source, target) in enumerate(pairs):
        assert len(source) == len(target)
        arguments = record_of(
            _Arguments(
                *(source.ctypes.data, target.ctypes.data, len(target) // BLOCK_BYTES),
                *(index == len(pairs) - 1, sums.ctypes.data, secret.ctypes.data),
            )
        )
        native(_copy)(arguments.ctypes.data, 0)
    return _merged(sums, secret.tobytes(), sum(map(len, targets)))


def _misplaced(target: Bytes) -> int:
    """Return how many bytes after the beginning of a cache line the target begins."""
    return target.ctypes.data % CACHE_LINE


def _copy(a: _Arguments, _thread: int) -> None:
    for block in range(a.num_blocks - a.is_last):
        offset = block * BLOCK_BYTES
        _copy_block(a.source + offset, a.target + offset, a.sums, a.secret)
    if a.is_last:
        offset = (a.num_blocks - 1) * BLOCK_BYTES
        _copy_last_block(a.source + offset, a.target + offset, a.sums, a.secret)
    _order_writes()


@instruction(types.void, *[types.int64] * 4)
def _copy_block(b: ir.IRBuilder, source: Any, target: Any, sums: Any, secret: Any) -> None:
    """Copy one block while hashing it: accumulate its stripes, then scramble the accumulators."""
    total = load(b, sums, _LANES, 8)
    for number in range(BLOCK_BYTES // _STRIPE):
        total = _add_stripe(b, total, source, target, secret, number, number * _STEP)
    key = load(b, b.add(secret, i64(_SECRET_BYTES - _STRIPE)), _LANES, 8)
    total = b.xor(b.xor(total, b.lshr(total, vector_of(_LANES, 47))), key)
    store(b, b.mul(total, vector_of(_LANES, _PRIMES_32[0])), sums, 8)


@instruction(types.void, *[types.int64] * 4)
def _copy_last_block(b: ir.IRBuilder, source: Any, target: Any, sums: Any, secret: Any) -> None:
    """Copy the last block of the input, whose last stripe uses another part of the secret."""
    total = load(b, sums, _LANES, 8)
    last = BLOCK_BYTES // _STRIPE - 1
    for number in range(last):
        total = _add_stripe(b, total, source, target, secret, number, number * _STEP)
    own = _SECRET_BYTES - _STRIPE - 7
    store(b, _add_stripe(b, total, source, target, secret, last, own), sums, 8)


def _add_stripe(
    b: ir.IRBuilder, total: Any, source: Any, target: Any, secret: Any, number: int, key_at: int
) -> Any:
    """Copy a stripe and add it to the accumulators: each lane's product, and its neighbour."""
    offset = number * _STRIPE
    write_prefetch(b, b.add(source, i64(offset + _AHEAD)))
    stripe = load(b, b.add(source, i64(offset)), _LANES, 8)
    copied = store(b, stripe, b.add(target, i64(offset)), 64)
    copied.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(I32, 1)]))
    mixed = b.xor(stripe, load(b, b.add(secret, i64(key_at)), _LANES, 8))
    product = b.mul(
        b.and_(mixed, vector_of(_LANES, (1 << 32) - 1)), b.lshr(mixed, vector_of(_LANES, 32))
    )
    swapped = shuffled(b, stripe, stripe, [1, 0, 3, 2, 5, 4, 7, 6])
    return b.add(total, b.add(product, swapped))


@instruction(types.void)
def _order_writes(b: ir.IRBuilder) -> None:
    """Order non-temporal stores before later stores."""
    b.fence("seq_cst")


def _secret_of(seed: int) -> npt.NDArray[np.uint64]:
    """Return the secret with the seed added to even words and subtracted from odd ones."""
    words = np.frombuffer(_SECRET, "<u8").astype(np.uint64)
    words[0::2] += np.uint64(seed & _BITS)
    words[1::2] -= np.uint64(seed & _BITS)
    return words


def _merged(sums: npt.NDArray[np.uint64], secret: bytes, num_bytes: int) -> int:
    """Return the digest that the accumulators amount to."""
    keys = np.frombuffer(secret, "<u8", 8, offset=11)
    lanes = [int(word) for word in sums ^ keys]
    digest = num_bytes * _PRIMES_64[0]
    for first, second in zip(lanes[0::2], lanes[1::2], strict=True):
        product = first * second
        digest += (product & _BITS) ^ (product >> 64)
    digest &= _BITS
    digest = (digest ^ digest >> 37) * _LAST_PRIME & _BITS
    return digest ^ digest >> 32
