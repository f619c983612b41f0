"""Runs a process that computes its part of a model on the leader's commands, without an engine."""

from __future__ import annotations

import threading

import structlog

from wire.process.lifetime import end_at_once
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model
from worker.compute.ranks import Ranks
from worker.executor.torch import make_cache
from worker.parallel.commands import Verb, receive
from worker.parallel.kv_copies import Steps, serve_copies
from worker.parallel.microbatches import compute
from worker.parallel.partition import Part

log = structlog.get_logger("worker")


def follow(model: Model, part: Part, ranks: Ranks) -> None:
    """Execute the leader's commands until `Verb.END`.

    Raises:
        RuntimeError: The leader or another process has died.
    """
    cache, steps, copying = None, Steps(), None
    while (order := receive(ranks)).verb is not Verb.END:
        if order.verb is Verb.ALLOCATE:
            cache = make_cache(model, part.layout, *order.numbers[:4])
            copying = threading.Thread(target=_copy, args=(ranks, cache, steps), name="kv-copy")
            copying.start()
        elif order.step is not None and cache is not None:
            compute(model, cache, order.step)
            cache.mark()
            steps.add()
    if copying is not None:
        copying.join()
    ranks.leave()


def _copy(ranks: Ranks, cache: TorchKVCache, steps: Steps) -> None:
    """Copy KV for the leader; on an error, end the process, because the leader awaits the copy."""
    try:
        serve_copies(ranks, cache, steps)
    except Exception as error:
        log.error("cannot copy KV for the leader", reason=f"{type(error).__name__}: {error}")
        end_at_once(1)
