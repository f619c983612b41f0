"""Bugs to plant, each one line of carelessness: the checks must catch every one of them.

A bug replaces one method for as long as it is planted.  One that names what is there no more fails
for the name, whatever the checks are worth: such a plant is broken, and has caught nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet
from router.core.placement import Placement
from router.core.replies import Replies
from router.core.state import RequestState
from tests.simulation.seeds import Outcome, run_seed
from wire.errors import ErrorCode, WireError
from wire.frames import Hello
from wire.layout import KVGroup
from wire.parts import Message
from wire.transfer import KVReceiver, KVSender
from worker import link
from worker.engine.blocks import BlockPool
from worker.engine.engine import Engine
from worker.roles.decode import DecodeRole
from worker.roles.local import LocalRequests
from worker.roles.prefill import PrefillRole
from worker.transfer.budget import TransferBudget
from worker.transfer.incoming import IncomingTransfer
from worker.transfer.receiver import IncomingTransfers
from worker.transfer.same_host_peers import SameHostPeers
from worker.transfer.sender import OutgoingTransfer


class Bug(NamedTuple):
    """`make` takes the `name` of `owner`, a class or module, and returns what is planted.

    `seed` is the first that catches it, as `scripts/simulate --hunt` finds it.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    seed: int = -1


# What Python says of a name that is not there, or is something else now.
_BROKEN: Final = re.compile(r"\b(AttributeError|NameError|TypeError)\b")


class BrokenPlant(Exception):
    """A planted bug does not fit the code any more: mend it in this file."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run with a bug, or for None without.

    Raises:
        BrokenPlant: What it replaces is not there.
    """
    if name is None:
        yield
        return
    bug = BUGS[name]
    if bug.name not in vars(bug.owner):
        raise BrokenPlant(f"{bug.owner.__name__} has no {bug.name} of its own")
    sound = vars(bug.owner)[bug.name]
    setattr(bug.owner, bug.name, bug.make(sound))
    try:
        yield
    finally:
        setattr(bug.owner, bug.name, sound)


def hunt(name: str, seeds: Iterable[int]) -> Outcome | None:
    """Return the first seed that catches a bug; None when it escapes all of them.

    Raises:
        BrokenPlant: As `planted`; or what went wrong is that the bug, or who calls it, names what
            is not there.
    """
    with planted(name):
        for seed in seeds:
            outcome = run_seed(seed)
            if _BROKEN.search(outcome.problem):
                raise BrokenPlant(f"seed {seed}: {outcome.problem}")
            if outcome.problem:
                return outcome
    return None


def _nothing(sound: Callable[..., Any]) -> Callable[..., None]:
    return lambda self, *args, **kwargs: None


def _drop_credit(sound: Any) -> property:
    # The window does not move on: what is stored makes no room.
    return property(lambda self: min(self.credit_bytes, self._expected_bytes))


def _skip_fence(sound: Callable[..., Any]) -> Callable[..., Any]:
    def hello(self: Fleet, identity: bytes, hello: Hello, *rest: Any) -> Any:
        for worker in self:
            if (worker.role, worker.rank) == (hello.role, hello.rank):
                worker.last_heard = 0.0  # so whoever comes takes its place
        return sound(self, identity, hello, *rest)

    return hello


def _keep_unasked(sound: Callable[..., Any]) -> Callable[..., Any]:
    def on_offer(
        self: IncomingTransfers, peer: bytes, request_id: int, message: Any, unasked: Any
    ) -> None:
        sound(self, peer, request_id, message, unasked)
        self._transfers[request_id].unasked = unasked  # whether or not its turn has come

    return on_offer


def _never_again(sound: Callable[..., Any]) -> Callable[..., Any]:
    def next_segment(self: KVSender, ahead_bytes: int = 0) -> Any:
        # What went with the offer counts as sent, also where it was dropped.
        return None if self.went_unasked else sound(self, ahead_bytes)

    return next_segment


def _free_early(sound: Callable[..., Any]) -> Callable[..., Any]:
    def give_back(self: IncomingTransfers, transfer: IncomingTransfer) -> None:
        # A copy may still write to these blocks.
        if transfer.is_dropped:
            request_id = transfer.receiver.request_id
            self._engine.post(lambda engine: engine.cancel(request_id))

    return give_back


def _reuse_ids(sound: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Placement, *args: Any, **settings: Any) -> None:
        sound(self, *args, **settings)
        first = (settings["request_ids"].epoch << 32) + 1
        ids: Any = itertools.cycle(range(first, first + 6))  # and then from the start again
        self._request_ids = ids

    return init


def _spare_decode(sound: Callable[..., Any]) -> Callable[..., Any]:
    def abandon(self: Dispatcher, attempt: Any, code: Any, spare: Any) -> None:
        # The decode worker is not told.
        sound(self, attempt, code, attempt.decode)

    return abandon


def _keep_promise(sound: Callable[..., Any]) -> Callable[..., Any]:
    def release_decode(self: Placement, attempt: Any) -> Any:
        worker = attempt.decode
        blocks = None if worker is None else worker.promised.get(attempt.request_id)
        sound(self, attempt)
        if worker is not None and blocks is not None:
            worker.promise(attempt.request_id, blocks)  # for ever
        return worker

    return release_decode


def _keep_local(sound: Callable[..., Any]) -> Callable[..., Any]:
    def on_token(self: LocalRequests, token: Any, steps: Any) -> None:
        request = self._requests.get(token.request_id)
        sound(self, token, steps)
        if request is not None:
            self._requests[token.request_id] = request  # it ended, and still counts

    return on_token


def _leave_unread(sound: Callable[..., Any]) -> Callable[..., Any]:
    def release_decode(self: Placement, attempt: Any) -> Any:
        attempt.is_in_prefill = False  # so its prompt counts as unread for ever
        return sound(self, attempt)

    return release_decode


def _leak_budget(sound: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: TransferBudget, transfer: IncomingTransfer) -> None:
        # Of those that had their turn, only the successful ones pay back.
        if not transfer.share_bytes or not transfer.is_dropped:
            sound(self, transfer)

    return end


def _keep_unclaimed(sound: Callable[..., Any]) -> Callable[..., Any]:
    def on_router_lost(self: DecodeRole, router: link.RouterLink) -> None:
        # KV that the router has not asked about yet waits for its lease.
        for request_id, generation in list(self._generations.items()):
            if generation.router is router:
                self.on_cancel(request_id)

    return on_router_lost


def _ack_early(sound: Callable[..., Any]) -> Callable[..., Any]:
    def unpack(self: IncomingTransfers, transfer: IncomingTransfer, segment: Any) -> None:
        self._cache.unpack(transfer.block_table, segment.rectangle, segment.kv)

    async def store(self: IncomingTransfers, batch: Any) -> None:
        for transfer, segment in batch:
            # The segment counts as stored before it is.
            self._acknowledge(transfer, transfer.receiver.stored(segment, self._clock()))
            try:
                await self._copies.run(unpack, self, transfer, segment, num_bytes=0)
            except WireError as error:
                self.fail(transfer.receiver.request_id, error)
            self._free_blocks(transfer)

    return store


def _keep_blocks(sound: Callable[..., Any]) -> Callable[..., Any]:
    async def send(self: PrefillRole, prefill: Any, transfer: OutgoingTransfer) -> None:
        await transfer.run()
        if prefill.is_ended:  # else nobody tells the engine
            self._engine.post(lambda engine: engine.cancel(prefill.request_id))

    return send


def _lend_nothing(sound: Callable[..., Any]) -> Callable[..., Any]:
    # What a socket may still have is given to others at once.
    return Engine.cancel


def _any_memory(sound: Callable[..., Any]) -> Callable[..., Any]:
    def memory_of(self: SameHostPeers, peer: bytes) -> Any:
        # Of whoever was met first.
        found = (sound(self, each) for each in self._mappings)
        return next((memory for memory in found if memory is not None), None)

    return memory_of


def _evict_half(sound: Callable[..., Any]) -> Callable[..., Any]:
    def evict(self: BlockPool) -> None:
        # The block is taken, and can still be found under its old tokens.
        block = next(iter(self._cached))
        del self._cached[block]
        self._free.append(block)

    return evict


def _share_anything(sound: Callable[..., Any]) -> Callable[..., bool]:
    # A known chain is shared whether or not windows and states are there.
    return lambda self, *args: True


def _keep_every_state(sound: Callable[..., Any]) -> Callable[..., Any]:
    def register(self: BlockPool, *args: Any, has_state: bool, **settings: Any) -> Any:
        return sound(self, *args, has_state=True, **settings)

    return register


def _short_window(sound: Callable[..., Any]) -> Callable[..., Any]:
    def sent(self: KVGroup, cached_tokens: int, num_tokens: int) -> Any:
        # A token is missing whose turn it is to be seen by the next one.
        tokens = sound(self, cached_tokens, num_tokens)
        return tokens if self.window is None else tokens[1:]

    return sent


def _double_token(sound: Callable[..., Any]) -> Callable[..., Any]:
    def on_tokens(self: Replies, peer: bytes, message: Message) -> None:
        sound(self, peer, message)
        attempts = [self.requests.attempts.get(request_id) for request_id, _ in message.tokens]
        if any(attempt is not None and attempt.state.num_attempts > 1 for attempt in attempts):
            sound(self, peer, message)  # again, after a failover

    return on_tokens


def _forget_tokens(sound: Any) -> property:
    # The next attempt reads the prompt without what was generated from it.
    return property(lambda self: self.request.token_ids)


def _keep_attempt(sound: Callable[..., Any]) -> Callable[..., Any]:
    def abandon(self: Dispatcher, attempt: Any, *args: Any) -> None:
        prefill, decode = attempt.prefill, attempt.decode
        sound(self, attempt, *args)
        # What the old attempt still says counts.
        self._attempts[attempt.request_id] = attempt
        attempt.prefill, attempt.decode = prefill, decode

    return abandon


def _spare_leaving(sound: Callable[..., Any]) -> Callable[..., Any]:
    def hand_over(self: Any, worker: Any) -> None:
        abandon = self._abandon
        # The worker that leaves is not told that it need not go on.
        self._abandon = lambda attempt, code, spare: abandon(attempt, code, worker)
        try:
            sound(self, worker)
        finally:
            del self._abandon

    return hand_over


def _keep_first(sound: Callable[..., Any]) -> Callable[..., Any]:
    def end_first(self: Dispatcher, attempt: Any) -> None:
        # Nothing is released: the worker seems to compute the prompt for ever.
        del self._attempts[attempt.request_id]
        attempt.state.attempt = None

    return end_first


def _cancel_half(sound: Callable[..., Any]) -> Callable[..., Any]:
    def on_cancel(self: DecodeRole, request_id: int) -> None:
        if request_id not in self.prefill.request_ids:
            sound(self, request_id)

    return on_cancel


def _miss_wake(sound: Callable[..., Any]) -> Callable[..., Any]:
    def on_ack(self: OutgoingTransfer, ack: Any, credit: Any) -> None:
        # The credit is noted, but who waits for it is not woken.
        self.sender.on_ack(ack, credit, self._clock())

    return on_ack


def _blame_others(sound: Callable[..., Any]) -> Callable[..., Any]:
    def overdue(self: Fleet, now: float) -> Any:
        self._looked_at = now  # nobody stood still
        return sound(self, now)

    return overdue


BUGS: dict[str, Bug] = {
    "drop-credit": Bug(KVReceiver, "granted_bytes", _drop_credit, 78),
    "skip-fence": Bug(Fleet, "hello", _skip_fence, 13),
    "keep-unasked": Bug(IncomingTransfers, "_on_offer", _keep_unasked, 13),
    "no-keepalive": Bug(KVSender, "keepalive", _nothing, 734),
    "never-again": Bug(KVSender, "next_segment", _never_again, 91),
    "free-early": Bug(IncomingTransfers, "_free_blocks", _free_early, 642),
    "reuse-id": Bug(Placement, "__init__", _reuse_ids, 0),
    "spare-decode": Bug(Dispatcher, "_abandon", _spare_decode, 1),
    "keep-promise": Bug(Placement, "release_decode", _keep_promise, 1),
    "no-digest": Bug(KVReceiver, "verify", _nothing, 21),
    "no-drain-echo": Bug(Dispatcher, "let_go", _nothing, 15),
    "leak-budget": Bug(TransferBudget, "end", _leak_budget, 5),
    "no-deadline": Bug(Dispatcher, "_fail_overdue", _nothing, 1),
    "ignore-router-loss": Bug(DecodeRole, "on_router_lost", _nothing, 11),
    "keep-unclaimed": Bug(DecodeRole, "on_router_lost", _keep_unclaimed, 11),
    "ack-early": Bug(IncomingTransfers, "_store", _ack_early, 0),
    "keep-blocks": Bug(PrefillRole, "_send", _keep_blocks, 0),
    "lend-nothing": Bug(Engine, "halt", _lend_nothing, 1207),
    "any-memory": Bug(SameHostPeers, "memory_of", _any_memory, 510),
    "evict-half": Bug(BlockPool, "_evict", _evict_half, 50),
    "share-anything": Bug(BlockPool, "_has_all", _share_anything, 1),
    "keep-every-state": Bug(BlockPool, "register", _keep_every_state, 15),
    "short-window": Bug(KVGroup, "sent", _short_window, 0),
    "double-token": Bug(Replies, "_on_tokens", _double_token, 4),
    "forget-tokens": Bug(RequestState, "token_ids", _forget_tokens, 0),
    "keep-attempt": Bug(Dispatcher, "_abandon", _keep_attempt, 0),
    "miss-wake": Bug(OutgoingTransfer, "on_ack", _miss_wake, 0),
    "keep-local": Bug(LocalRequests, "on_token", _keep_local, 1),
    "leave-unread": Bug(Placement, "release_decode", _leave_unread, 16),
    "spare-leaving": Bug(Dispatcher, "_hand_over", _spare_leaving, 252),
    "keep-first": Bug(Dispatcher, "end_first", _keep_first, 471),
    "cancel-half": Bug(DecodeRole, "on_cancel", _cancel_half, 291),
    "blame-others": Bug(Fleet, "overdue", _blame_others, 7),
    # Found here, and put back to see that it would be found again.
    "cancelled-by-nobody": Bug(
        link, "BETWEEN_WORKERS", lambda sound: sound - {ErrorCode.CANCELLED}, 1178
    ),
}
