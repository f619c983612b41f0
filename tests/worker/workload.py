"""Random workloads on one engine of the hash executor, driven by a fake clock; for property tests.

A workload is a pure function of its seed: the engine's settings and what arrives when.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import structs

from tests.oracle import oracle
from wire.errors import ErrorCode
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.options import Options
from wire.transfer import Rectangle, plan
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.outputs import Computed, Displaced, Failed, Output, Reserved, Started, Token
from worker.engine.sequence import Sequence
from worker.engine.speculation import Drafter
from worker.engine.unpacking import unpack
from worker.executor.contract import ModelInfo
from worker.executor.hash import EOS_TOKEN_IDS, LAYOUT, MIXED, HashExecutor, kv_words, state_after

# So few that n-grams recur and guesses are right now and then.
VOCAB_SIZE = 6
MAX_MODEL_LEN = 48
MAX_STEPS = 3000
# So long after it is offered, KV is asked for.
CLAIMED_AFTER = 3


# The hash executor's two layers, alike and not, and with a state; the windows are short enough that
# most prompts are longer.
ALL, NEAR, STATE = MIXED.groups
assert isinstance(NEAR, KVGroup)
NEAR = structs.replace(NEAR, window=6)
LAYOUTS = {
    "all": LAYOUT,
    "window": KVLayout(groups=(ALL, NEAR)),
    "windows": KVLayout(groups=(structs.replace(NEAR, window=3), NEAR)),
    "state": KVLayout(groups=(structs.replace(ALL, num_layers=2), STATE)),
    "mixed": KVLayout(groups=(ALL, NEAR, STATE)),
}


def hash_executor(layout: KVLayout = LAYOUT) -> HashExecutor:
    return HashExecutor(ModelInfo("hash", "hash", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, layout))


@lru_cache(maxsize=20_000)
def full_text(
    prompt: tuple[int, ...], limit: int, options: Options, layout: KVLayout = LAYOUT
) -> tuple[int, ...]:
    text = oracle(prompt, limit, options, VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, layout=layout)
    return tuple(text)


def sent_kv(layout: KVLayout, prompt: Many[int], cached: int) -> Iterator[tuple[Rectangle, bytes]]:
    """Another worker's KV of a prompt, for a worker that has the first tokens."""
    positions = np.arange(len(prompt), dtype=np.int32)
    words = kv_words(np.array(prompt, np.int32), positions)
    for rectangle in plan(layout, cached, len(prompt), 1 << 20):
        if isinstance(layout.groups[rectangle.group], StateGroup):
            yield rectangle, state_after(words).tobytes()
            continue
        kv_groups = [it for it in layout.groups[: rectangle.group] if isinstance(it, KVGroup)]
        first_layer = sum(group.num_layers for group in kv_groups)
        layers = words[:, first_layer : first_layer + len(rectangle.layers)]
        tokens = rectangle.tokens
        yield rectangle, layers[tokens.start : tokens.stop].transpose(1, 2, 3, 0).tobytes()


class Fortune:
    """A drafter that knows the future, and lies about every third token."""

    vocab_size: int | None = VOCAB_SIZE

    def __init__(self, num_drafts: int, layout: KVLayout = LAYOUT) -> None:
        self.num_drafts = num_drafts
        self._layout = layout

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        drafts = []
        for sequence, limit in zip(sequences, limits, strict=True):
            prompt, so_far = sequence.token_ids[: sequence.prompt_len], sequence.num_output_tokens
            number = so_far + min(limit, self.num_drafts)
            text = full_text(tuple(prompt), number, sequence.options, self._layout)
            future = text[so_far:]
            lies = [(so_far + i) % 3 == 2 for i in range(len(future))]
            pairs = zip(future, lies, strict=True)
            drafts.append([(t + is_lie) % VOCAB_SIZE for t, is_lie in pairs])
        return drafts

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


@dataclass
class Request:
    """One request: what is asked, when, and what became of it."""

    request_id: int
    arrival: int
    kind: str  # plain, transfer or reserved
    prompt: tuple[int, ...]
    options: Options
    limit: int
    cancel_at: int | None
    layout: KVLayout
    text: list[int] = field(default_factory=list)
    end: str | None = None
    end_step: int = 0

    @property
    def expected(self) -> tuple[int, ...]:
        limit = 1 if self.kind == "transfer" else self.limit
        return full_text(self.prompt, limit, self.options, self.layout)


class Workload:
    """One engine, its requests, and the part of a role: it answers outputs as a worker would."""

    def __init__(self, seed: int, layout: KVLayout = LAYOUT, **settings: Any) -> None:
        self.draw = random.Random(seed)
        self.layout = layout
        self.now = 0.0
        self.drafter: Drafter | str | None = None
        self.engine = self._engine(settings)
        self.requests = [self._request(request_id) for request_id in range(self.draw.randint(1, 9))]
        self.longest_wait = 0
        self.num_shared = 0  # tokens of reservations that were here already

    def _engine(self, settings: dict[str, Any]) -> Engine:
        draw = self.draw
        self.drafter = draw.choice(
            [None, "ngram:2", "ngram:5", Fortune(4, self.layout), model_drafter(draw)]
        )
        block_size = draw.choice([1, 2, 3, 4, 8])
        chosen = {
            "num_blocks": max(2, draw.randint(30, 60) // block_size),  # one or two requests fit
            "block_size": block_size,
            "max_ubatch_tokens": draw.choice([1, 3, 9, 64, 64]),
            "max_sbatch_sequences": draw.choice([1, 4, 64]),
            "prefer_pure_decode": draw.random() < 0.3,
            "dynamic_batching": draw.random() < 0.8,
            "prefix_cache": draw.random() < 0.7,
            "ageing_s": draw.choice([0.01, 1.0, 10.0]),
            "swap_bytes": draw.choice([0, 0, 10, 40, 1000]) * self.layout.token_bytes,
            "speculate": self.drafter,
        } | settings
        if self.layout.has_state:
            chosen.setdefault("num_states", draw.choice([2, 5, 9, 30]))
        self.drafter = chosen["speculate"]
        engine = Engine(self._executor(), clock=lambda: self.now, **chosen)
        engine.swap.costs.copy_bytes_per_s = draw.choice([1.0, 1e6, 1e12])
        return engine

    def _executor(self) -> HashExecutor:
        return hash_executor(self.layout)

    def _request(self, request_id: int) -> Request:
        draw = self.draw
        head = [draw.choice([3, 4])] * draw.randint(1, 14)
        prompt = (*head, *(draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(0, 4))))
        options = Options(
            ignore_eos=draw.random() < 0.7,
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randint(0, 3),
            priority=draw.randint(-5, 5),
            deadline_ms=draw.choice([None, None, None, None, 5_000, 40_000]),
            min_tokens=draw.choice([0, 0, 3]),
            stop_token_ids=draw.choice([(), (), (), (), (5,)]),
        )
        return Request(
            request_id,
            arrival=draw.randint(0, draw.choice([2, 20])),
            kind=draw.choice(["plain", "plain", "plain", "transfer", "reserved"]),
            prompt=prompt,
            options=options,
            limit=draw.randint(1, 30),
            cancel_at=draw.randint(0, 40) if draw.random() < 0.2 else None,
            layout=self.layout,
        )

    def run(self) -> None:
        """Step until every request has ended; check everything after every step."""
        for step in range(MAX_STEPS):
            for request in self.requests:
                self._act(request, step)
            # As the thread of an engine does, which sleeps otherwise.
            for output in self.engine.step() if self.engine.has_work() else ():
                self._hear(output, step)
            self.check()
            self.now += 1.0
            if all(request.end for request in self.requests):
                return self._rest()
        raise AssertionError("a request starves")

    def check(self) -> None:
        self.engine.check()
        self.engine.pool.audit()
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.check()
            self.drafter.pool.audit()
        for sequence in self.engine.scheduler.running:
            room = self.engine.pool.blocks_for(sequence.num_tokens + 1)
            assert len(sequence.block_table) <= room, "more blocks than tokens need"

    def _rest(self) -> None:
        """Nothing is left anywhere."""
        for request in self.requests:
            self.engine.release(request.request_id)
            self.engine.cancel(request.request_id)
        assert self.engine.step() == [] and not self.engine.has_work()
        self.check()
        stats = self.engine.stats()
        assert stats.blocks_used == stats.num_swapped == stats.num_waiting == stats.num_running == 0
        assert self.engine.idle_s() is None
        if isinstance(self.drafter, ModelDrafter):
            assert self.drafter.pool.num_used == 0

    def _act(self, request: Request, step: int) -> None:
        engine, request_id = self.engine, request.request_id
        if step == request.arrival and request.end is None:
            if request.kind == "reserved":
                engine.reserve(request_id, request.prompt)
            else:
                is_transfer = request.kind == "transfer"
                engine.add(
                    Sequence(
                        request_id,
                        request.prompt,
                        request.options,
                        request.limit,
                        transfer=is_transfer,
                    )
                )
        if request.kind == "reserved" and step == request.arrival + CLAIMED_AFTER:
            engine.claim(request_id)
        if step == request.cancel_at and request.end is None:
            engine.cancel(request_id)
            self._end(request, "cancelled", step)

    def _hear(self, output: Output, step: int) -> None:
        request = self.requests[output.request_id]
        if isinstance(output, Displaced):
            if request.end is None and not request.text:  # else its router asked for it meanwhile
                self.engine.cancel(request.request_id)
                self.engine.reserve(request.request_id, request.prompt)
            return
        if request.end == "cancelled" and isinstance(output, Failed):
            return  # refused before the cancel came, told after it
        assert request.end is None, "something follows the end"
        match output:
            case Started() | Computed():
                pass
            case Reserved():
                self._begin(request, output, step)
            case Token():
                index = len(request.text) - (request.kind == "reserved")
                assert output.index == index, "a token was lost or told twice"
                if output.finish_reason != "stop":
                    request.text.append(output.token_id)
                if output.finish_reason or request.kind == "transfer":
                    self._end(request, output.finish_reason or "handed over", step)
                    if request.kind == "transfer":
                        self.engine.release(request.request_id)
            case Failed():
                self._check_failure(request, output)
                self._end(request, "failed", step)
                self.engine.cancel(request.request_id)

    def _begin(self, request: Request, reserved: Reserved, step: int) -> None:
        """Bring the KV another worker would, and the first token."""
        first = full_text(request.prompt, 1, request.options, self.layout)
        if not first or request.limit == 1:
            self.engine.cancel(request.request_id)
            request.text += first
            return self._end(request, "stop" if not first else "length", step)
        self.num_shared += reserved.cached_tokens
        for rectangle, kv in sent_kv(self.layout, request.prompt, reserved.cached_tokens):
            unpack(self.engine.cache, reserved.block_table, rectangle, kv, len(request.prompt))
        request.text += first
        self.engine.begin_decode(
            request.request_id, [*request.prompt, *first], request.options, request.limit - 1
        )

    def _check_failure(self, request: Request, failed: Failed) -> None:
        if failed.code is ErrorCode.DEADLINE_EXCEEDED:
            assert request.options.deadline_ms is not None
            assert self.now >= request.arrival + request.options.deadline_ms / 1000
        else:
            pool = self.engine.pool
            num_tokens = len(request.prompt) + len(request.text) + 1
            assert failed.code is ErrorCode.OUT_OF_BLOCKS
            assert not pool.can_ever_fit(num_tokens)

    def _end(self, request: Request, reason: str, step: int) -> None:
        request.end, request.end_step = reason, step
        text = tuple(request.text)
        assert text == request.expected[: len(text)], f"request {request.request_id}: other text"
        if reason in ("stop", "length", "handed over"):
            assert text == request.expected, f"request {request.request_id} is cut short"


def model_drafter(draw: random.Random) -> ModelDrafter:
    """The target itself as its own draft model: every guess is right, if there is room for it."""
    return ModelDrafter(
        hash_executor(),
        draw.randint(1, 4),
        num_blocks=draw.randint(2, 30),
        block_size=draw.choice([1, 3, 4]),
        max_ubatch_tokens=draw.choice([3, 64]),
    )
