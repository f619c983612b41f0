"""Where the text of one answer is in its structure, and what may follow there.  SPEC 4.9.

A pure function of the generated tokens, kept up to date from them: so a preemption, a transfer or a
failover changes nothing, and one can look ahead along drafts and back again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from wire.process.structure import StructureError

if TYPE_CHECKING:  # executors without structures need not have it
    from llguidance import LLMatcher


class Compiled(NamedTuple):
    """A grammar at its beginning, and a mask of EOS: [words] int32, a bit for each token."""

    matcher: LLMatcher
    eos: npt.NDArray[np.int32]


class Structured:
    """Where the text of one sequence is in its structure.

    Used by one thread at a time: by the engine's, and between `Grammars.start` and `take` by one of
    theirs.
    """

    def __init__(self, compiled: Future[Compiled], prompt_len: int) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_seen = prompt_len
        self._num_after_end = 0  # those of a draft model that goes on after EOS
        self._problem: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._compiled.done()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready, but not longer than so many seconds."""
        wait([self._compiled], timeout_s)

    @property
    def problem(self) -> str | None:
        """Why the answer cannot be held to its structure any longer, or never could."""
        if self._problem is None and self.is_ready and (error := self._compiled.exception()):
            self._problem = f"structure: {StructureError(str(error))}"
        return self._problem

    @property
    def eos(self) -> npt.NDArray[np.int32]:
        """The mask of EOS, once it is ready."""
        return self._compiled.result().eos

    def begin(self, prompt_len: int) -> Structured:
        """Return the beginning of the same structure, for another answer."""
        return Structured(self._compiled, prompt_len)

    def rewind(self, num_tokens: int) -> None:
        """Forget the tokens after the first `num_tokens`, which include the whole prompt."""
        if self._matcher is not None and num_tokens < self._num_seen:
            num_back = self._num_seen - num_tokens
            num_uncounted = min(num_back, self._num_after_end)
            self._matcher.rollback(num_back - num_uncounted)
            self._num_after_end -= num_uncounted
            self._num_seen = num_tokens

    def fill(
        self, token_ids: Sequence[int], drafts: Sequence[int], address: int, row_bytes: int
    ) -> bool:
        """Write what may follow `token_ids`, then what may follow them with each draft more.

        D + 1 rows from `address` on; those behind a draft that is not allowed, or that ends the
        text, are not written: nothing that is drawn from them counts.

        Returns:
            Whether that could be told; if not, there is a `problem`.
        """
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
        if not matcher.is_error():
            return True
        self._problem = f"structure: {StructureError(matcher.get_error())}"
        return False
