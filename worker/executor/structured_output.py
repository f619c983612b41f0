"""The progress of one response through its grammar, and its token masks (SPEC 4.9).

Both are a pure function of the generated tokens, so they survive preemption, transfer and failover.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wire.process.background import in_background
from wire.process.structured_output import StructureError

if TYPE_CHECKING:  # optional at run time
    from llguidance import LLMatcher

# Submits a call to another thread.
Submit = Callable[[Callable[[], Any]], Future[Any]]


class Compiled(NamedTuple):
    """A compiled grammar in its initial state, and a mask of the EOS tokens: [words] int32."""

    matcher: LLMatcher
    eos: npt.NDArray[np.int32]


class Structured:
    """The progress of one sequence through its structure.

    Only one thread uses it at a time: the engine's thread, a mask thread between `Grammars.start`
    and `take`, or a background thread until it `is_ready`.

    Attributes:
        is_slow: Its masks take so long that steps should not wait for them.
        mask_s: How many seconds its last mask took.
    """

    def __init__(self, compiled: Future[Compiled], prompt_len: int, mask_threads: Submit) -> None:
        self.is_slow = False
        self.mask_s = 0.0
        self._compiled = compiled
        self._mask_threads = mask_threads
        # The last mask computed in the background.
        self._mask: Future[npt.NDArray[np.int32]] | None = None
        self._matcher: LLMatcher | None = None
        self._num_seen = prompt_len
        self._num_after_end = 0  # the number of tokens after EOS, from a draft model
        self._problem: str | None = None

    @property
    def is_ready(self) -> bool:
        """True if compilation has ended and no mask is being computed in the background."""
        return self._compiled.done() and (self._mask is None or self._mask.done())

    def wait(self, timeout_s: float) -> None:
        """Wait until the grammar or the mask in the background is ready, at most `timeout_s`."""
        awaited: Future[Any] = self._compiled if self._mask is None else self._mask
        wait([awaited], timeout_s)

    def make_mask(self, token_ids: Sequence[int]) -> None:
        """Start to compute the mask after `token_ids` in the background.

        Until the mask is computed, `is_ready` is False and the tokens must not change.
        """
        self._mask = self._mask_threads(partial(self._make_mask, token_ids))

    def cancel(self) -> None:
        """Cancel a background mask whose computation has not started."""
        if self._mask is not None:
            self._mask.cancel()

    @property
    def problem(self) -> str | None:
        """The reason why the response cannot follow its structure, or None."""
        if self._problem is None and self.is_ready and (error := self._compiled.exception()):
            self._problem = f"structure: {StructureError(str(error))}"
        return self._problem

    @property
    def eos(self) -> npt.NDArray[np.int32]:
        return self._compiled.result().eos

    def begin(self, prompt_len: int) -> Structured:
        """Return a copy of the structure in its initial state, for a response to a new prompt."""
        return Structured(self._compiled, prompt_len, self._mask_threads)

    def rewind(self, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` tokens, which must include the prompt."""
        self._mask = None
        if self._matcher is not None and num_tokens < self._num_seen:
            num_back = self._num_seen - num_tokens
            # The matcher has not consumed the tokens after EOS.
            num_unconsumed = min(num_back, self._num_after_end)
            self._matcher.rollback(num_back - num_unconsumed)
            self._num_after_end -= num_unconsumed
            self._num_seen = num_tokens

    def fill(
        self, token_ids: Sequence[int], drafts: Sequence[int], address: int, row_bytes: int
    ) -> bool:
        """Write the masks after `token_ids` and after each of D drafts: D + 1 rows at `address`.

        Rows after a draft that is forbidden or ends the text are not written.  Return whether this
        succeeded; if not, `problem` is set.
        """
        if self._mask is not None and len(token_ids) == self._num_seen and not drafts:
            ctypes.memmove(address, self._mask.result().ctypes.data, row_bytes)
        else:
            self._follow(token_ids, drafts, address, row_bytes)
        return self._problem is None

    def _follow(
        self, token_ids: Sequence[int], drafts: Sequence[int], address: int, row_bytes: int
    ) -> None:
        started_s = time.perf_counter()
        if self._matcher is None:
            self._matcher = self._compiled.result().matcher.deep_copy()
        matcher = self._matcher
        new, self._num_seen = token_ids[self._num_seen :], len(token_ids)
        for token_id in new:
            if matcher.is_stopped():
                self._num_after_end += 1
            else:
                matcher.consume_token(token_id)
        matcher.unsafe_compute_mask_ptr(address, row_bytes)
        num_ahead = 0
        for draft in drafts:
            if not matcher.try_consume_tokens([draft]):
                break
            num_ahead += 1
            matcher.unsafe_compute_mask_ptr(address + num_ahead * row_bytes, row_bytes)
        if num_ahead:
            matcher.rollback(num_ahead)
        if matcher.is_error():
            self._problem = f"structure: {StructureError(matcher.get_error())}"
        self.mask_s = time.perf_counter() - started_s

    def _make_mask(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        bits = np.empty_like(self.eos)
        in_background(partial(self._follow, token_ids, (), bits.ctypes.data, bits.nbytes))
        return bits
