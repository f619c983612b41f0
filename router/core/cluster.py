"""Reports on the workers and requests, for `GET /v1/cluster`, readiness checks and systemd."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from shlex import quote
from typing import Any, Final

import structlog
from msgspec import Struct

from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet, Worker, WorkerState
from wire.frames import Role
from wire.payloads import Load

log = structlog.get_logger("router")

# The interval between two log lines about missing workers.
AGAIN_S: Final = 10.0


class ProcessState(Struct):
    """One router process: request counts, workers as JSON, and the reasons why it is not ready."""

    pid: int
    running: int
    waiting: int
    reasons: list[str]
    workers: list[dict[str, Any]]
    fingerprint: str = ""
    refused: list[dict[str, Any]] = []


def state_of(dispatcher: Dispatcher, now: float, *, is_draining: bool = False) -> ProcessState:
    """Return the state of this process.

    The figures of a worker are from its last heartbeat, `last_seen_s` seconds ago.  Only `placed`
    is current: the number of attempts that this process has on the worker.
    """
    fleet = dispatcher.fleet
    return ProcessState(
        pid=os.getpid(),
        running=dispatcher.num_running,
        waiting=dispatcher.num_waiting,
        reasons=unready(dispatcher.missing_roles, fleet, is_draining=is_draining),
        workers=[_worker(worker, now) for worker in fleet],
        fingerprint=fleet.model_fingerprint,
        refused=fleet.refusals.rows(now),
    )


def together(states: Sequence[ProcessState], *, are_several: bool = False) -> dict[str, Any]:
    """Merge the states of the router's processes into the body of `GET /v1/cluster`.

    Each worker is listed as the first process reports it, and request counts are summed.  If the
    router has several processes (`are_several`), each of `states` is listed too.
    """
    workers: dict[tuple[str, int], dict[str, Any]] = {}
    for row in (row for state in states for row in state.workers):
        key = row["role"], row["rank"]
        placed = row["placed"] + (workers[key]["placed"] if key in workers else 0)
        workers[key] = workers.get(key, row) | {"placed": placed}
    counts: dict[str, Any] = {
        "running": sum([state.running for state in states]),
        "waiting": sum([state.waiting for state in states]),
        "fingerprint": next((state.fingerprint for state in states), ""),
    }
    if are_several:
        counts["processes"] = [
            {"pid": each.pid, "running": each.running, "waiting": each.waiting} for each in states
        ]
    rows = sorted(workers.values(), key=lambda row: (row["role"] != "prefill", row["rank"]))
    refused = {row["worker"]: row for state in states for row in state.refused}
    return {"workers": rows, "router": counts, "refused": list(refused.values())}


def reasons_of(states: Sequence[ProcessState]) -> list[str]:
    """Return the reasons why any of the processes is not ready, without duplicates."""
    return list(dict.fromkeys(reason for state in states for reason in state.reasons))


def is_free(states: Sequence[ProcessState], role: str, rank: int) -> bool:
    """Whether a worker may have this rank: no process has one that does.  False without `states`.

    Workers of role decode and any share their ranks.
    """
    rows = [row for state in states for row in state.workers if row["state"] != "lost"]
    taken = [(row["role"] == "prefill", row["rank"]) for row in rows]
    return bool(states) and (role == "prefill", rank) not in taken


def status_line(states: Sequence[ProcessState]) -> str:
    """Return the status line for systemd: the numbers of requests and ready workers."""
    now = together(states)
    ready = Counter(row["role"] for row in now["workers"] if row["state"] == "ready")
    roles = ("prefill", "decode", "any") if ready["any"] else ("prefill", "decode")
    workers = " and ".join([f"{ready[role]} {role}" for role in roles])
    counts = now["router"]
    return f"{counts['running']} running, {counts['waiting']} waiting, {workers} workers ready"


def _worker(worker: Worker, now: float) -> dict[str, Any]:
    load, detail = worker.load or Load(total=0, used=0, cached=0, free=0), worker.detail
    return {
        "role": worker.role.name.lower(),
        "rank": worker.rank,
        "epoch": worker.epoch,
        "state": worker.state.value,
        "why": _why(worker),
        "last_seen_s": round(now - worker.last_seen, 3),
        "placed": len(worker.attempts),
        "running": worker.running,
        "waiting": worker.waiting,
        "step": worker.step,
        "blocks": _fields(load, "total", "used", "cached", "free"),
        "tiers": {
            name: _fields(tier, "max_blocks", "blocks", "bytes", "loaded_tokens")
            for name, tier in (("host", load.host), ("disk", load.disk))
            if tier is not None
        },
        "kv_inflight_bytes": load.kv_inflight_bytes,
        "costs": {
            "step_s": worker.step_s,
            "token_s": worker.token_s,
            "sequence_s": worker.sequence_s,
            "kv_transfer_s": worker.transfer_s,
            "kv_byte_s": worker.byte_s,
        },
        "computes": _fields(detail, "arithmetic", "threads", "cores", "shards", "stages"),
        "kv": {
            "endpoint": detail.kv_endpoint,
            "layout": str(detail.layout),
            "token_bytes": detail.layout.token_bytes,
            "block_size": detail.block_size,
        },
    }


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _why(worker: Worker) -> str:
    """Return why a worker is suspect or lost, or ""."""
    if worker.state is WorkerState.SUSPECT:
        return "its engine is stalled in one step" if worker.is_stalled else "it is silent"
    return worker.lost_why


def unready(missing: Sequence[Role], fleet: Fleet, *, is_draining: bool) -> list[str]:
    """Return the reasons why requests cannot be served now; `missing` are roles without workers."""
    reasons = [
        f"no worker that can {each.name.lower()} is ready" + _others(fleet, each)
        for each in missing
    ]
    return [*reasons, "the router is draining"] if is_draining else reasons


class Readiness:
    """Logs which workers are missing, every `AGAIN_S` seconds, and, once the router is ready, an
    example command."""

    def __init__(self, try_this: str) -> None:
        self._ready = f"ready; try {try_this}"
        self._is_ready = self._has_been_ready = False
        self._next_at = 0.0

    def on_look(self, reasons: Sequence[str], now: float) -> None:
        """Log changes of the reasons for not being ready.  Call it about once a second."""
        if not reasons:
            if not self._is_ready:
                log.info(self._ready)
            self._is_ready = self._has_been_ready = True
        elif self._is_ready or now >= self._next_at:
            self._is_ready, self._next_at = False, now + AGAIN_S
            # At startup it is normal that workers have not joined yet, so do not warn.
            note = log.warning if self._has_been_ready else log.info
            note("waiting for workers", reasons=list(reasons))


def try_this(url: str, model: str, *, has_text: bool, has_keys: bool) -> str:
    """Return a shell command that sends an example completion request."""
    prompt = '"Once upon a time"' if has_text else "[1, 2, 3]"
    key = " -H 'authorization: Bearer '$BATON_API_KEY" if has_keys else ""
    body = f'{{"model": {json.dumps(model)}, "prompt": {prompt}, "max_tokens": 16}}'
    return f"curl {url}/v1/completions{key} -H 'content-type: application/json' -d {quote(body)}"


def _others(fleet: Fleet, role: Role) -> str:
    known = [f"{each.name} is {each.state.value}" for each in fleet if each.can(role)]
    return f": {', '.join(known[:8])}" if known else ""
