"""Replays of kept requests on other workers, compared token by token (`baton verify`).

A request is kept while its record in `router.core.history` has its tokens and its options, which it
gets if `Limits.keep_requests` names its client.  A replay is a request of its own with the same
prompt, seed and other options, so that a worker with the same arithmetic generates the same tokens.
A `cache_salt` that nobody else has makes its workers compute all KV anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import unpack
from typing import Literal

from msgspec import Struct, structs

from router.core.fleet import Fleet
from router.core.history.chains import TOKEN_BYTES
from router.core.history.record import Placed, Record
from router.core.history.report import worker_name
from router.core.queue import MAX_PRIORITY
from router.core.request import Request, RequestEnd
from wire.errors import WireError
from wire.frames import Role
from wire.options import decode_options
from wire.payloads import Logprobs, PrefillResult, Usage


class UsedWorker(Struct, frozen=True):
    """A worker that served an attempt, and its arithmetic as in HELLO."""

    worker: str
    arithmetic: str


class UsedPair(Struct, frozen=True):
    """The workers of one attempt, whose first token has the index `first_token` in the answer.

    Without `prefill` the decode worker did the prefill; without `decode` there was one token.
    """

    first_token: int
    prefill: UsedWorker | None
    decode: UsedWorker | None

    def source(self, position: int) -> UsedWorker:
        """Return the worker that generated the token at this index."""
        pair = (self.prefill, self.decode)
        return next(it for it in (pair if position == self.first_token else pair[::-1]) if it)


class Difference(Struct):
    """The first difference: the tokens at an index in the answer, null where an answer ended."""

    position: int
    kept_token: int | None
    kept_by: UsedWorker
    replayed_token: int | None
    replayed_by: UsedWorker


class ReplayedChoice(Struct):
    """How the replay of a choice compares; `tokens` is the number of leading tokens that are equal.

    `outcome` is that of the kept request.  If a client, a stop string or an error ended it, the
    replay is compared as far as the answer went.
    """

    client: str
    equal: bool
    tokens: int
    outcome: str
    first_difference: Difference | None
    kept: Sequence[UsedPair]
    replayed: Sequence[UsedPair]


class Verification(Struct):
    """Whether all choices of a request were replayed with equal tokens."""

    id: str
    equal: bool
    choices: list[ReplayedChoice]
    object: Literal["verification"] = "verification"


class KeptRequest(Struct, frozen=True):
    """A request that has ended, with all that a replay needs.  Router processes pass it on.

    `token_ids` are those of the prompt, `num_prompt` of them, and of the answer, as little-endian
    u32.  `options` are encoded as workers got them.  `is_whole` means that workers ended the
    answer: not a stop string, an error or a cancel.
    """

    client: str
    num_prompt: int
    token_ids: bytes
    options: bytes
    outcome: str
    is_whole: bool
    pairs: tuple[UsedPair, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens that were generated, without the one that ended the answer."""
        return _unpack(self.token_ids[self.num_prompt * TOKEN_BYTES :])

    @property
    def max_new_tokens(self) -> int:
        """The limit of its replay, first token not included: up to the token that ended it."""
        num_tokens = len(self.token_ids) // TOKEN_BYTES - self.num_prompt
        return num_tokens - (self.outcome == "length")

    def replay(self, client: str, name: str, salt: str, excluded: frozenset[bytes]) -> Request:
        """Return the request to submit for `client`, with the id `name`.

        It goes after all other requests.
        """
        changes = {"cache_salt": salt, "priority": -MAX_PRIORITY}
        options = structs.replace(
            decode_options(self.options), **changes, deadline_ms=None, traceparent=None
        )
        prompt = _unpack(self.token_ids[: self.num_prompt * TOKEN_BYTES])
        return Request(prompt, options, self.max_new_tokens, client, name, excluded=excluded)


def kept_requests(records: Sequence[Record]) -> list[KeptRequest]:
    """Return the kept requests of these records, without those that never generated a token.

    Return none if one of them runs, or generated tokens that are not kept (any more).
    """
    kept = list[KeptRequest]()
    for it in records:
        if it.end is not None and it.chain is not None and it.options is not None:
            kept.append(
                KeptRequest(
                    client=it.client,
                    num_prompt=it.num_tokens,
                    token_ids=it.chain,
                    options=it.options,
                    outcome=it.end.outcome,
                    is_whole=it.is_whole,
                    pairs=_pairs(it.placed),
                )
            )
        elif it.end is None or it.end.completion_tokens:
            return []
    return kept


def workers_to_exclude(
    kept: KeptRequest, fleet: Fleet, *, local_prefill: bool, same_worker: bool
) -> frozenset[bytes] | None:
    """Return the workers that a replay must avoid, by identity; None if no others could serve it.

    These are all that served the request, or if others cannot prefill, those that decoded it.  With
    `same_worker` they are all others.
    """
    used = {it.worker for pair in kept.pairs for it in (pair.prefill, pair.decode) if it}
    decoded = {pair.source(pair.first_token + 1).worker for pair in kept.pairs}
    others = {it.name for it in fleet.live} - used
    for names in (others,) if same_worker else (used, decoded):
        left = [it for it in fleet.live if it.is_ready and it.name not in names]
        can_prefill = local_prefill or any(it.can(Role.PREFILL) for it in left)
        can_decode = not kept.max_new_tokens or any(it.can(Role.DECODE) for it in left)
        if left and can_prefill and can_decode:
            return frozenset(it.identity for it in fleet.live if it.name in names)
    return None


class Comparison:
    """The sink of a replay: compares its tokens with the kept ones up to the first that differs.

    `on_over` is called once the result is known, perhaps again later.  `error` is why a replay
    failed before that.
    """

    def __init__(self, kept: KeptRequest, on_over: Callable[[], None]) -> None:
        self.error: WireError | None = None
        self._kept = kept
        # None is the end of an answer.
        self._expected = (*kept.answer, None) if kept.is_whole else kept.answer
        self._num_equal = 0
        self._differing: list[int | None] = []
        self._on_over = on_over
        self._end: RequestEnd | None = None

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        if result.finish_reason != "stop":  # else the token is EOS
            self._compare(result.token_id)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        self._compare(token_id)

    def on_done(self, usage: Usage) -> None:
        self._compare(None)

    def on_error(self, error: WireError) -> None:
        self.error = error
        self._on_over()

    def on_end(self, end: RequestEnd) -> None:
        self._end = end

    def _compare(self, token: int | None) -> None:
        if not self._is_over:
            if token == self._expected[self._num_equal]:
                self._num_equal += 1
            else:
                self._differing.append(token)
        if self._is_over:
            self._on_over()

    @property
    def _is_over(self) -> bool:
        return bool(self._differing) or self._num_equal == len(self._expected)

    def result(self) -> ReplayedChoice:
        """Return the comparison, after the replay has ended."""
        kept, end, position = self._kept, self._end, self._num_equal
        difference = None
        assert end is not None and end.record is not None, "only requests with records are kept"
        replayed = _pairs(end.record.placed)
        if self._differing:
            difference = Difference(
                position=position,
                kept_token=self._expected[position],
                kept_by=_source(kept.pairs, position),
                replayed_token=self._differing[0],
                replayed_by=_source(replayed, position),
            )
        return ReplayedChoice(
            client=kept.client,
            equal=difference is None,
            tokens=min(position, len(kept.answer)),
            outcome=kept.outcome,
            first_difference=difference,
            kept=kept.pairs,
            replayed=replayed,
        )


def _source(pairs: Sequence[UsedPair], position: int) -> UsedWorker:
    # Of several attempts, the last that began by then: those before it failed.
    return [it for it in pairs if it.first_token <= position][-1].source(position)


def _pairs(attempts: Sequence[Placed]) -> tuple[UsedPair, ...]:
    return tuple(
        UsedPair(
            it.num_generated,
            _used(it.prefill, it.prefill_arithmetic),
            _used(it.decode, it.decode_arithmetic),
        )
        for it in attempts
    )


def _used(identity: bytes | None, arithmetic: str) -> UsedWorker | None:
    name = worker_name(identity)
    return None if name is None else UsedWorker(name, arithmetic)


def _unpack(token_ids: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(token_ids) // TOKEN_BYTES}I", token_ids)
