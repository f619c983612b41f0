"""The last requests of a router process, for `usage.baton` and `GET /v1/requests/{id}`.

The dispatcher reports when a request waits, is placed and ends; the bus reports what workers cache
and when they are lost.  Only counts, ids of requests and names of workers leave this module: no
text and no tokens.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection
from struct import pack
from typing import Final

from msgspec import convert

from router.core.fleet import Fleet, Worker
from router.core.history.chains import TOKEN_BYTES, Chains
from router.core.history.losses import Losses
from router.core.history.misses import explain, see
from router.core.history.record import Ended, Placed, Record
from router.core.request import RequestEnd
from router.core.state import Attempt, RequestState
from wire.frames import Role
from wire.payloads import Load

# The most records for one id: the choices of a request, or requests with an id of the client's.
MAX_OF_NAME: Final = 128


class History:
    """Up to `max_records` requests, of which the latest have their tokens, up to `max_bytes`.

    A client with more than an equal share of the records loses its own oldest one for its next;
    other clients cause the loss of the oldest of all.  It is one of `Dispatcher.observers`.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_records: int,
        max_bytes: int,
        keep_requests: frozenset[str] = frozenset(),
        local_prefill: bool = False,
    ) -> None:
        self.local_prefill = local_prefill
        self._keep_requests = keep_requests
        self._fleet = fleet
        self._max_records = max_records
        self._chains = Chains(max_bytes)
        self._losses = Losses()
        # Workers that have reported cached blocks.
        self._caching: set[bytes] = set()
        self._numbers = itertools.count()
        self._by_age: OrderedDict[int, Record] = OrderedDict()
        self._of_client: dict[str, OrderedDict[int, Record]] = {}
        # By client and id; a request has a record for each of its choices.
        self._by_name: dict[tuple[str, str], tuple[Record, ...]] = {}
        self._of_attempt: dict[int, Record] = {}  # by request id

    def __len__(self) -> int:
        return len(self._by_age)

    def find(self, name: str, client: str | None = None) -> list[Record]:
        """Return the records with this id, of this client or of any (None); empty without."""
        clients = self._of_client if client is None else (client,)
        return [record for each in clients for record in self._by_name.get((each, name), ())]

    def keeps(self, client: str) -> bool:
        """Whether the requests of a client are kept for replays."""
        return not self._keep_requests.isdisjoint(("all", client))

    def name_of(self, client: str | None, request_id: int) -> str | None:
        """Return the id of the request of an attempt, if it is this client's, or any's (None)."""
        record = self._of_attempt.get(request_id)
        return record.name if record is not None and client in (None, record.client) else None

    def latest(self, most: int) -> list[Record]:
        """Return up to `most` records, the newest first."""
        return list(itertools.islice(reversed(self._by_age.values()), most))

    def on_waiting(self, state: RequestState) -> None:
        """Begin the record of an accepted request, if there is none yet."""
        if state.record is not None or not self._max_records:
            return
        request = state.request
        while len(self._by_age) >= self._max_records:
            self._drop(self._next_to_drop(request.client))
        state.record = record = Record(
            number=next(self._numbers),
            name=request.name,
            client=request.client,
            salt=request.options.cache_salt,
            num_tokens=len(request.token_ids),
            submitted_at=state.submitted_at,
            progress=state,
            outline=request.outline,
            is_scored=request.options.prompt_logprobs is not None,
            traceparent=request.options.traceparent,
            begins_trace=request.begins_trace,
        )
        self._by_age[record.number] = record
        self._of_client.setdefault(record.client, OrderedDict())[record.number] = record
        key = record.client, record.name
        records = self._by_name.get(key, ())
        if len(records) == MAX_OF_NAME or all(each.end for each in records):
            records = ()
        self._by_name[key] = (*records, record)

    def on_placed(self, attempt: Attempt, payload: bytes, now: float) -> None:
        """Record an attempt; `payload` is its PREFILL_REQUEST, which begins with the token ids."""
        state = attempt.state
        if (record := state.record) is None:
            return
        attempt.placed = _placed(attempt, now)
        record.placed += (attempt.placed,)
        if record.number in self._by_age:  # otherwise nothing would remove it
            self._of_attempt[attempt.request_id] = record
        if state.first is not None or state.request.excluded is not None:
            return  # it goes on behind the tokens that the client has, or is a replay
        record.prefiller = attempt.prefiller.identity
        if record.seen is None:
            chain = payload[: attempt.seq_len * TOKEN_BYTES]
            match = self._chains.nearest(record.client, chain, record.salt)
            if self.keeps(record.client):
                record.options = payload[len(chain) :]
            self._chains.add(record, chain)
        else:
            match = record.seen.match
        record.seen = see(
            attempt, match, self._losses, self._fleet, local_prefill=self.local_prefill
        )

    def on_request_end(self, end: RequestEnd) -> None:
        """Complete the record of a request that ended; explain what its cache had."""
        if (record := end.record) is None or record.progress is None:
            return
        record.end = convert(end, Ended, from_attributes=True)
        record.is_whole = end.code is None and not record.progress.is_cut
        record.keep_timelines()
        if record.is_in_flight or record.seen is None:
            self._chains.drop(record)
        else:
            record.cache = explain(record, self._fleet, self._losses, self._caching)
            generated = record.progress.generated
            self._chains.extend(record, pack(f"<{len(generated)}I", *generated))
        record.progress = record.seen = None

    def on_load(self, worker: Worker, load: Load, now: float) -> None:
        """Record what a heartbeat of a worker says of its cache."""
        if not self._max_records:
            return
        if load.cached or load.stored:
            self._caching.add(worker.identity)
        if self._may_prefill(worker):
            for tier, hashes in load.losses:
                self._losses.on_evicted(worker, hashes, tier, now)

    def on_worker_lost(self, worker: Worker, hashes: Collection[int], now: float) -> None:
        """Record that a worker left, restarted or was lost, with the blocks of these hashes."""
        self._caching.discard(worker.identity)
        if self._max_records and self._may_prefill(worker):
            self._losses.on_lost(worker, hashes, now)

    def _may_prefill(self, worker: Worker) -> bool:
        return self.local_prefill or worker.can(Role.PREFILL)

    def _next_to_drop(self, client: str) -> Record:
        own = self._of_client.get(client)
        is_over = own and len(own) + 1 > self._max_records / len(self._of_client)
        oldest = own if own and is_over else self._by_age
        return next(iter(oldest.values()))

    def _drop(self, record: Record) -> None:
        self._chains.drop(record)
        for each in record.placed:
            del self._of_attempt[each.request_id]
        del self._by_age[record.number]
        del self._of_client[record.client][record.number]
        if not self._of_client[record.client]:
            del self._of_client[record.client]
        key = record.client, record.name
        if others := tuple(each for each in self._by_name.get(key, ()) if each is not record):
            self._by_name[key] = others
        else:
            self._by_name.pop(key, None)


def _placed(attempt: Attempt, now: float) -> Placed:
    prefill, decode = attempt.prefill, attempt.decode
    return Placed(
        None if prefill is None else prefill.identity,
        None if decode is None else decode.identity,
        attempt.state.local_reasons[-1] if attempt.is_local else None,
        now,
        attempt.request_id,
        num_generated=attempt.num_generated,
        prefill_arithmetic="" if prefill is None else prefill.detail.arithmetic,
        decode_arithmetic="" if decode is None else decode.detail.arithmetic,
    )
