"""The grammars of one model's answers: compiled, followed, and masks made beside the forward pass.

`start` is called before a forward pass and `take` after it, so that masks cost no time where the
forward pass, which does without the GIL, takes longer.  Grammars are compiled by other threads, at
which tenants take turns; llguidance does that without the GIL too, and in the background.

An ambiguous grammar may need 10 ms for each mask, and one request has up to 128 answers.  A step
that would take twice as long for its masks does not wait for the slowest of them again: they are
made one after another in the background, tenants in turn, and a sequence takes part in a step when
its mask is ready (`Structured.is_slow`).
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

# Threads that compile: a structure that takes long does not keep a second one waiting, nor two of a
# tenant those of another.
_NUM_COMPILING: Final = 3
# Grammars that are kept: clients send the same few again and again.
_NUM_KEPT: Final = 32
_WORD_BITS: Final = 32
# Masks of one step may take so long, whatever the forward pass takes.
_MIN_MASKS_S: Final = 0.001

Bits = npt.NDArray[np.int32]

log = structlog.get_logger("worker")


class Masks(NamedTuple):
    """What structures allow in the rows of a step, of which one at least has a structure.

    Attributes:
        bits: [R, words] int32, bit t of a row for token t; all of them in rows without one.
        over: The rows in which nothing but EOS is allowed, of those whose options say more.
        failed: The first row that has no mask, for its sequence has a problem.
    """

    bits: Bits
    over: list[int]
    failed: int | None = None


class Grammars:
    """What the answers of one model are held to; called by the engine's thread only."""

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin to read a tokenizer.json; nobody waits for it before the first structure."""
        self._clock = clock
        self._eos = sorted(eos_token_ids)
        self._compiling = FairThreads(_NUM_COMPILING, "compile")
        self._following = ThreadPoolExecutor(1, thread_name_prefix="follow")
        self._slow_masks = FairThreads(1, "slow-masks")
        load = partial(_load, tokenizer, vocab_size, self._eos)
        self._tokenizer = self._compiling.submit("the model", load)
        self._kept: FairCache[Structure, Compiled] = FairCache(self._compiling, _NUM_KEPT)
        self._started: Future[Masks] | None = None
        self._started_s = 0.0
        self._held: list[Structured] = []  # those of the step that was started

    def structured(self, structure: Structure, prompt_len: int, tenant: int = 0) -> Structured:
        """Return the state of a text after its prompt; the grammar is compiled meanwhile."""
        try:
            compiled = self._kept.ask(tenant, structure, partial(self._compile, structure))
        except WireError as error:
            compiled = Future()
            compiled.set_exception(StructureError(error.message))
        return Structured(compiled, prompt_len, partial(self._slow_masks.submit, tenant))

    def start(self, samplings: Sequence[Sampling]) -> None:
        """Begin to compute the masks of a step's rows, if any sequence has a structure."""
        self.take()  # of a step that failed
        self._held = [it.structured for it in samplings if it.structured is not None]
        if self._held:
            self._started_s = self._clock()
            self._started = self._following.submit(self._masks, samplings)

    def take(self) -> Masks | None:
        """Return the masks of the step that was started last, once; None if it has none."""
        started, self._started = self._started, None
        if started is None:
            return None
        forward_s = self._clock() - self._started_s
        masks = started.result()
        self._find_slow(2 * max(forward_s, _MIN_MASKS_S))
        self._held = []
        return masks

    def _find_slow(self, limit_s: float) -> None:
        """Mark the sequences of the step whose masks take more than an equal part of a limit that
        all masks together exceed."""
        is_over = sum(it.mask_s for it in self._held) > limit_s
        for it in self._held:
            it.is_slow = is_over and it.mask_s > limit_s / len(self._held)

    def shutdown(self) -> None:
        """Stop the threads; what they are at is not waited for."""
        self._compiling.shutdown()
        self._following.shutdown()
        self._slow_masks.shutdown()
        self._kept.clear()

    def _compile(self, structure: Structure) -> Compiled:
        tokenizer = self._tokenizer.result()
        grammar = grammar_of(structure)
        compile_ = partial(LLMatcher, tokenizer, grammar, log_level=0, limits=limits())
        matcher = in_background(compile_)
        # What every text begins with is computed here, once, and so is what takes longest.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error()
            del matcher  # or the exception, which is kept, would keep it: up to 100 MB
            raise StructureError(reason)
        eos = np.zeros(-(-tokenizer.vocab_size // _WORD_BITS), np.uint32)
        for token_id in self._eos:
            eos[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)
        return Compiled(matcher, eos.view(np.int32))

    def _masks(self, samplings: Sequence[Sampling]) -> Masks:
        held: list[tuple[int, Sampling, Structured]] = []  # with its first row
        limited: list[int] = []  # rows whose options say more of what may be drawn
        going_on: list[int] = []  # rows in which an answer may not end yet
        row = 0
        for it in samplings:
            first, row = row, row + 1 + len(it.drafts)
            if it.structured is None:
                continue
            held.append((first, it, it.structured))
            options = it.options
            num_early = options.min_tokens - (it.position - it.prompt_len)
            is_early = options.ignore_eos or num_early > 0
            if is_early:
                going_on += range(first, row if options.ignore_eos else min(row, first + num_early))
            if is_early or options.allowed_token_ids or options.bad_sequences:
                limited += range(first, row)
        eos = held[0][2].eos
        # All bits set: rows behind a draft that is not allowed are not written, and never count.
        bits = np.full((row, len(eos)), -1, np.int32)
        address, row_bytes = bits.ctypes.data, bits.strides[0]
        failed: int | None = None
        for number, it, structured in held:
            place = address + number * row_bytes
            if not structured.fill(it.token_ids, it.drafts, place, row_bytes) and failed is None:
                failed = number
        over: list[int] = []
        if limited:
            others = bits & ~eos
            over = [number for number in limited if not others[number].any()]
            early = [number for number in going_on if number not in over]
            bits[early] = others[early]
        return Masks(bits, over, failed)


def _load(path: Path, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Read a tokenizer.json; ids of the model that it lacks stand for no text.

    Raises:
        StructureError: No answer of this model can be held to a structure.
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
