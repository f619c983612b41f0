"""The parent keeps the counters of a process that has ended, and its listening sockets."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry, Counter

from router.core.cluster import ProcessState
from router.processes.listeners import Listeners
from router.processes.merged_metrics import families
from router.processes.process import Process


def test_counters_of_a_dead_process_are_taken_over_once() -> None:
    process, registry = Process(1, "tcp://127.0.0.1:5601"), CollectorRegistry()
    Counter("baton_requests", "Ends.", registry=registry).inc()
    process.is_listening, process.metrics = True, families(registry.collect())
    process.is_aborted, process.state = True, ProcessState(7, 1, 0, [], [])
    assert [family.name for family in process.forget()] == ["baton_requests"]
    assert process.forget() == []
    assert not process.is_listening, "nobody is to wait for its answers"
    assert process.drained.is_set(), "nor for its clients"
    assert process.state is None, "nor is anybody to count its requests"
    assert not process.is_aborted, "if the next one is stuck too, it shows its stacks"


def test_a_process_keeps_one_set_of_listening_sockets() -> None:
    process = Process(0, "tcp://127.0.0.1:5600")
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, other = (Listeners(*[server.fileno()] * 3).copy() for _ in range(2))
        process.keep(one)
        process.keep(other)
        with pytest.raises(OSError):
            one.close()
        process.keep(None)
        with pytest.raises(OSError):
            other.close()
    assert process.listeners is None
