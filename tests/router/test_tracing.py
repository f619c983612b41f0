"""Spans of requests: in the SDK's memory, and at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from router.config import Config
from router.core.history.record import Ended, Placed, Record
from router.core.request import Request
from router.tracing import MAX_WAITING, Tracing
from tests.cluster import Cluster
from tests.router.core import states
from wire.options import Options
from wire.timeline import Entry, Kind, pack_timeline

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PREFILL = [Entry(Kind.REQUEST, 0.0, 0.9), Entry(Kind.PREFILL, 0.1, 0.8, 2)]
DECODE = [
    Entry(Kind.REQUEST, 0.1, 1.9),
    Entry(Kind.TRANSFER, 0.0, 0.3, 2),
    Entry(Kind.DECODE, 0.4, 1.5, 20),
    Entry(Kind.STALL, 1.0, 0.5, 512),
    Entry(Kind.PREEMPTION, 1.6, 0.1, 9),
]


def ended(*placed: Placed, outcome: str = "stop", begins_trace: bool = False) -> Record:
    return Record(
        number=1,
        name="r-1",
        client="secret-client",
        salt="secret-salt",
        num_tokens=40,
        submitted_at=time.monotonic() - 5.0,
        progress=None,
        traceparent=f"00-{TRACE}-{PARENT}-01",
        begins_trace=begins_trace,
        placed=placed,
        end=Ended(outcome, 16, 21, 640, 0, 0.5, 1.5, 4.0),
    )


def placed(record_at: float, **fields: Any) -> Placed:
    made = Placed(b"prefill-0-1", b"decode-2-1", None, record_at + 0.5, 5)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def spans_of(record: Record) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    state = states.state(Request((1,), Options()))
    state.record = record
    tracing.on_request_end(state.end(11.0, None, None))
    tracing.close(10.0)
    spans = exporter.get_finished_spans()
    assert not [it for it in spans if "secret" in str(it.to_json())]
    return {span.name: span for span in spans}


def served() -> Record:
    record = ended()
    at = record.submitted_at
    whole = placed(at, read_at=at + 1.5, asked_at=at + 1.5, ended_at=at + 3.5, outcome="stop")
    whole.kv_bytes = 640
    whole.prefill_timeline, whole.decode_timeline = pack_timeline(PREFILL), pack_timeline(DECODE)
    record.placed = (whole,)
    return record


def test_a_request_is_a_span_with_its_parts_below() -> None:
    spans = spans_of(served())
    assert spans.keys() == {"llm_request", "queue", "prefill", "kv_transfer", "decode"}
    request = spans["llm_request"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.input_tokens"] == 40
    for name, begin_s, end_s in (
        ("llm_request", 0.0, 4.0),
        ("queue", 0.0, 0.5),
        ("prefill", 0.65, 1.45),
        ("kv_transfer", 1.45, 1.75),
        ("decode", 1.85, 3.35),
    ):
        span = spans[name]
        assert span.start_time is not None and span.end_time is not None
        assert request.start_time is not None
        times = [(it - request.start_time) / 1e9 for it in (span.start_time, span.end_time)]
        assert times == pytest.approx([begin_s, end_s], abs=1e-5), name
        if span is not request:
            assert span.parent is not None and span.parent.span_id == request.context.span_id
    decode = spans["decode"]
    assert [event.name for event in decode.events] == ["stall", "preemption"]
    assert decode.attributes is not None and decode.attributes["baton.worker"] == "decode-2"
    assert all(it.status.status_code is not StatusCode.ERROR for it in spans.values())


def test_a_trace_that_the_router_began_has_no_parent() -> None:
    record = served()
    record.begins_trace = True
    request = spans_of(record)["llm_request"]
    assert request.parent is None and f"{request.context.trace_id:032x}" == TRACE


def test_the_part_in_which_an_attempt_failed_has_the_error() -> None:
    record = ended(outcome="worker_lost")
    at = record.submitted_at
    record.placed = (placed(at, ended_at=at + 1.0, outcome="worker_lost"),)
    spans = spans_of(record)
    assert spans.keys() == {"llm_request", "queue", "prefill"}
    assert spans["prefill"].status.description == "worker_lost"
    assert spans["llm_request"].status.status_code is StatusCode.ERROR


def test_a_request_that_was_never_placed_waited_to_its_end() -> None:
    spans = spans_of(ended(outcome="overloaded"))
    assert spans.keys() == {"llm_request", "queue"}


def test_what_ends_faster_than_spans_are_made_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Tracing, "_trace", lambda *_: go_on.wait())
    tracing = Tracing(InMemorySpanExporter())
    state = states.state(Request((1,), Options()))
    state.record = ended()
    end = state.end(11.0, None, None)
    for _ in range(MAX_WAITING + 3):
        tracing.on_request_end(end)
    assert tracing.num_dropped in (2, 3), "one may be with the thread"
    go_on.set()
    tracing.close(10.0)


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP collector on a free port: its URL, and the spans that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


def test_a_cluster_exports_to_a_collector(tmp_path: Path) -> None:
    with collector() as (url, spans):
        args = ("--otlp-endpoint", url)
        with Cluster(tmp_path, executor="hash", args=args) as cluster:
            body = {"model": "demo", "prompt": [5] * 40, "max_tokens": 8, "ignore_eos": True}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            for given in (headers, {}):
                httpx.post(f"{cluster.http}/v1/completions", json=body, headers=given, timeout=30)
        roots = [span for span in spans if span.name == "llm_request"]
        assert len(roots) == 2, "a router that ends sends what is left"
        assert roots[0].trace_id.hex() == TRACE and roots[0].parent_span_id.hex() == PARENT
        assert roots[1].trace_id.hex() != TRACE and not roots[1].parent_span_id
        names = {span.name for span in spans if span.trace_id == roots[1].trace_id}
        assert names == {"llm_request", "queue", "prefill", "kv_transfer", "decode"}
        lines = [it for it in cluster.events("request") if it["face"] == "http"]
        logged = [it["trace_id"] for it in lines if it["endpoint"] == "completions"]
        assert logged == [root.trace_id.hex() for root in roots]


def test_spans_need_an_endpoint_and_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    monkeypatch.delenv(name, raising=False)
    assert not Config(model="demo").is_tracing
    assert Config(model="demo", otlp_endpoint="http://127.0.0.1:4318").is_tracing
    monkeypatch.setenv(name, "http://127.0.0.1:4318")
    assert Config(model="demo").is_tracing
    assert not Config(model="demo", request_history=0).is_tracing
    with pytest.raises(ValueError, match="URL of a collector"):
        Config(model="demo", otlp_endpoint="localhost:4318")
