"""Measures the loopback link, and predicts whether splitting prefill and decode pays."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.command.doctor.cluster import kv_endpoint
from router.command.doctor.finding import Finding, ok, warning
from wire.process.cores import parse_cores

# The size of the measurement, which takes a tenth of a second on a slow machine.
NUM_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 2 << 20  # a KV segment
# The prompt of the prediction, in tokens.
PROMPT: Final = 1024


def loopback_rate() -> float:
    """Send `NUM_BYTES` over TCP from one thread to another; return the rate in bytes per second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(),))
        sender.start()
        connection, _ = server.accept()
        buffer = bytearray(CHUNK_BYTES)
        with connection:
            start = time.perf_counter()
            while connection.recv_into(buffer):
                pass
            took_s = time.perf_counter() - start
        sender.join()
    return NUM_BYTES / took_s


def _send(address: tuple[str, int]) -> None:
    chunk = bytes(CHUNK_BYTES)
    with socket.create_connection(address) as connection:
        for _ in range(NUM_BYTES // CHUNK_BYTES):
            connection.sendall(chunk)


def check_links(rate: float, live: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the rate of loopback, and of each worker's link as the router has learnt it."""
    found = [ok("links", "loopback TCP", f"{rate / 1e9:.1f} GB/s, measured now")]
    for row in live:
        byte_s = row["costs"]["kv_byte_s"]
        if byte_s and row["role"] != "prefill":  # which receives none, and shows the best of others
            name = f"KV to {row['role']}-{row['rank']}"
            what = f"{1 / byte_s / 1e9:.2f} GB/s, learnt by the router from transfers"
            found.append(ok("links", name, what))
    return found


def predict(live: Sequence[Mapping[str, Any]], loopback: float) -> Finding:
    """Predict from the measured costs of running workers whether splitting pays.

    Args:
        live: Rows of /v1/cluster.
        loopback: The rate of loopback in bytes per second, used while no transfer was measured.
    """
    where = f"prompts of {PROMPT} tokens"
    token_s = _lowest(live, "token_s")
    token_bytes = max((row.get("kv", {}).get("token_bytes", 0) for row in live), default=0)
    if not token_s or not token_bytes:
        what = "whether it pays is measured by a running cluster: none here has served prompts yet"
        return ok("splitting", where, what)
    byte_s, transfer_s = _lowest(live, "kv_byte_s") or 1 / loopback, _lowest(live, "kv_transfer_s")
    # On one worker, a prefill of P tokens delays each of the N answers that it generates by
    # P * token_s.  Split, it delays none, but its KV has to be sent.  So splitting pays once
    #     N > (transfer_s + P * token_bytes * byte_s) / (P * token_s).
    # The router weighs the same costs for each request (`router.core.policy`).
    sent_s, prefill_s = transfer_s + PROMPT * token_bytes * byte_s, PROMPT * token_s
    figures = f"prefill {prefill_s * 1e3:.1f} ms, KV {sent_s * 1e3:.1f} ms"
    if shares_cores(live):
        what = f"prefill and decode workers share cores, so one slows the other ({figures})"
        cure = "--local auto, or cores, GPUs or machines of their own for the two roles"
        return warning("splitting", where, what, cure)
    enough = int(sent_s / prefill_s) + 1
    answers = "the first answer on" if enough == 1 else f"{enough} answers at a time"
    what = f"pays from {answers}, with hardware of its own for each role"
    return ok("splitting", where, f"{what} ({figures})")


def shares_cores(live: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prefill and a decode worker run on the same cores of what seems one machine."""
    seats = {"prefill": set[int](), "decode": set[int]()}
    for row in live:
        is_near = "127.0.0.1" in kv_endpoint(row) or row["role"] == "prefill"
        is_on_cpu = not row["computes"]["arithmetic"].startswith("cuda")
        if row["role"] in seats and is_near and is_on_cpu:
            seats[row["role"]] |= parse_cores(row["computes"]["cores"])
    return bool(seats["prefill"] & seats["decode"])


def _lowest(live: Sequence[Mapping[str, Any]], cost: str) -> float:
    """Return the lowest measured cost in seconds, 0.0 if none was measured."""
    return min((row["costs"][cost] for row in live if row["costs"][cost]), default=0.0)
