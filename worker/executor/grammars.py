"""Grammars for structured output: threads compile them, and compute token masks during a forward.

`start` is called before a forward pass and `take` after it, so masks delay a step only if they take
longer than the forward pass, which releases the GIL.  Tenants share the compiling threads fairly.

A mask of an ambiguous grammar may take 10 ms, and one request has up to 128 choices.  If masks
double the duration of a step, slow ones are computed in the background from then on, and their
sequences join a step only when their mask is ready (`Structured.is_slow`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher, LLTokenizer

from wire.errors import WireError
from wire.options import Structure
from wire.process.background import in_background
from wire.process.fair_cache import FairCache
from wire.process.fair_threads import FairThreads
from wire.process.structured_output import StructureError, grammar_of, limits
from worker.executor.batch import Sampling
from worker.executor.structured_output import Compiled, Structured

# Enough threads that slow structures, even two of one tenant, do not delay those of others.
_NUM_COMPILING: Final = 3
# The number of cached grammars; clients tend to send the same few repeatedly.
_NUM_KEPT: Final = 32
_WORD_BITS: Final = 32
# Masks of one step that take less than this are never slow.
_MIN_MASKS_S: Final = 0.001

Bits = npt.NDArray[np.int32]

log = structlog.get_logger("worker")


class Masks(NamedTuple):
    """The allowed tokens of a step in which at least one sequence has a structure.

    Attributes:
        bits: [R, words] int32; bit t of a row allows token t.  Rows without a structure allow all.
        over: Rows with other restrictions in which the structure allows only EOS.
        failed: The row of the first sequence that has no mask but a `problem`, or None.
    """

    bits: Bits
    over: list[int]
    failed: int | None = None


class Grammars:
    """The grammars of one model.  Only the engine's thread may use it."""

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start to load a tokenizer.json in the background."""
        self._clock = clock
        self._eos = sorted(eos_token_ids)
        self._compiling = FairThreads(_NUM_COMPILING, "compile")
        self._following = ThreadPoolExecutor(1, thread_name_prefix="follow")
        self._slow_masks = FairThreads(1, "slow-masks")
        load = partial(_load, tokenizer, vocab_size, self._eos)
        self._tokenizer = self._compiling.submit("the model", load)
        self._kept: FairCache[tuple[str, Structure], Compiled] = FairCache(
            self._compiling, _NUM_KEPT
        )
        self._started: Future[Masks] | None = None
        self._started_s = 0.0
        self._current: list[Structured] = []  # those in the step that was started

    def structured(
        self, structure: Structure, prompt_len: int, tenant: int = 0, cache_salt: str = ""
    ) -> Structured:
        """Start to compile a grammar; return its initial state for a new response."""
        compute = partial(self._compile, structure)
        try:
            compiled = self._kept.get(tenant, (cache_salt, structure), compute)
        except WireError as error:
            compiled = Future()
            compiled.set_exception(StructureError(error.message))
        return Structured(compiled, prompt_len, partial(self._slow_masks.submit, tenant))

    def start(self, samplings: Sequence[Sampling]) -> None:
        """Start to compute the masks of a step's rows, if any sequence has a structure."""
        self.take()  # discards the masks of a step that failed
        self._current = [it.structured for it in samplings if it.structured is not None]
        if self._current:
            self._started_s = self._clock()
            self._started = self._following.submit(self._masks, samplings)

    def take(self) -> Masks | None:
        """Wait for the masks of the last `start` and return them, once; None if there are none."""
        started, self._started = self._started, None
        if started is None:
            return None
        forward_s = self._clock() - self._started_s
        masks = started.result()
        self._find_slow(2 * max(forward_s, _MIN_MASKS_S))
        self._current = []
        return masks

    def _find_slow(self, limit_s: float) -> None:
        """Mark sequences as slow if all masks together took longer than the limit and theirs took
        longer than an equal share of it."""
        is_over = sum(it.mask_s for it in self._current) > limit_s
        for it in self._current:
            it.is_slow = is_over and it.mask_s > limit_s / len(self._current)

    def shutdown(self) -> None:
        """Stop the threads without waiting for their work."""
        self._compiling.shutdown()
        self._following.shutdown()
        self._slow_masks.shutdown()
        self._kept.clear()

    def _compile(self, structure: Structure) -> Compiled:
        tokenizer = self._tokenizer.result()
        grammar = grammar_of(structure)
        compile_ = partial(LLMatcher, tokenizer, grammar, log_level=0, limits=limits())
        matcher = in_background(compile_)
        # The first mask, often the slowest, is computed once and cached in the matcher.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error()
            del matcher  # else the cached exception would keep up to 100 MB alive
            raise StructureError(reason)
        eos = np.zeros(-(-tokenizer.vocab_size // _WORD_BITS), np.uint32)
        for token_id in self._eos:
            eos[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)
        return Compiled(matcher, eos.view(np.int32))

    def _masks(self, samplings: Sequence[Sampling]) -> Masks:
        found: list[tuple[int, Sampling, Structured]] = []  # the int is its first row
        limited: list[int] = []  # rows with other restrictions
        unfinished: list[int] = []  # rows in which a response may not end yet
        row = 0
        for it in samplings:
            first, row = row, row + 1 + len(it.drafts)
            if it.structured is None:
                continue
            found.append((first, it, it.structured))
            options = it.options
            num_early = options.min_tokens - (it.position - it.prompt_len)
            is_early = options.ignore_eos or num_early > 0
            if is_early:
                last = row if options.ignore_eos else min(row, first + num_early)
                unfinished += range(first, last)
            if is_early or options.allowed_token_ids or options.bad_sequences:
                limited += range(first, row)
        eos = found[0][2].eos
        # Rows after a forbidden draft are not written; they stay all ones and do not matter.
        bits = np.full((row, len(eos)), -1, np.int32)
        address, row_bytes = bits.ctypes.data, bits.strides[0]
        failed: int | None = None
        for number, it, structured in found:
            start = address + number * row_bytes
            if not structured.fill(it.token_ids, it.drafts, start, row_bytes) and failed is None:
                failed = number
        over: list[int] = []
        if limited:
            others = bits & ~eos
            over = [number for number in limited if not others[number].any()]
            early = [number for number in unfinished if number not in over]
            bits[early] = others[early]
        return Masks(bits, over, failed)


def _load(path: Path, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Load a tokenizer.json; ids of the model that it lacks get no text.

    Raises:
        StructureError: This model cannot generate structured output.
    """
    if not eos_token_ids:
        raise StructureError("this model has no EOS token, so no answer could end")
    try:
        text = path.read_text(encoding="utf-8")
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
        except ValueError:  # it may have more tokens than the model
            return LLTokenizer(text, eos_token=eos_token_ids)
    except (OSError, ValueError) as error:
        log.warning("no structured output", tokenizer=str(path), reason=str(error))
        raise StructureError("this model's tokenizer cannot be held to a structure") from None
