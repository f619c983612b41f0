"""OpenTelemetry spans of requests, made from their timelines when they have ended.

Only the router makes spans, so workers need no OpenTelemetry.  The extra `otel` has the libraries,
and this module must be imported only if spans are wanted.  The event loop hands over the record of
a request; one thread makes spans of it, another one of the SDK exports them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from queue import Full, Queue
from typing import Final, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from router.core.history.record import Placed, Record
from router.core.history.report import worker_name
from router.core.history.timeline import AttemptTimeline, timeline
from router.core.request import RequestEnd

# Requests that ended and have no spans yet; more are dropped, and counted.
MAX_WAITING: Final = 2048
TRACES_PATH: Final = "/v1/traces"
_SUCCESS: Final = ("stop", "length")
_NS: Final = 1_000_000_000


class _Ids(RandomIdGenerator):
    """Random ids, but the trace id that the router has given the request, where it began one."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()


class _Part(NamedTuple):
    """A span below that of the request; times are in seconds since it was submitted."""

    name: str
    at_s: float
    duration_s: float
    attributes: Mapping[str, AttributeValue] = {}


class Tracing:
    """Exports spans of requests that have a `traceparent`.  It is one of `Dispatcher.observers`.

    It must come after the history there, which completes the record.  `num_dropped` counts requests
    that ended faster than their spans were made.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.num_dropped = 0
        self._ids = _Ids()
        service = os.environ.get("OTEL_SERVICE_NAME", "baton-router")
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton")
        self._ended: Queue[Record | None] = Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_request_end(self, end: RequestEnd) -> None:
        """Queue the record of a request for its spans; never block."""
        if end.record is None or end.record.traceparent is None:
            return
        try:
            self._ended.put_nowait(end.record)
        except Full:
            self.num_dropped += 1

    def close(self, timeout_s: float) -> None:
        """Export what is queued, for at most `timeout_s` and the timeout of the exporter."""
        try:
            self._ended.put(None, timeout=timeout_s)
        except Full:
            return
        self._thread.join(timeout_s)
        self._provider.shutdown()

    def _run(self) -> None:
        while (record := self._ended.get()) is not None:
            self._trace(record)

    def _trace(self, record: Record) -> None:
        """Make the spans of one request.  All its times are those of its timeline."""
        end, traceparent = record.end, record.traceparent
        if end is None or traceparent is None:
            return
        _, trace_id, parent_id, flags = (int(part, 16) for part in traceparent.split("-"))
        parent = SpanContext(trace_id, parent_id, is_remote=True, trace_flags=TraceFlags(flags))
        context = None if record.begins_trace else set_span_in_context(NonRecordingSpan(parent))
        self._ids.trace_id = trace_id
        begin_ns = time.time_ns() - round((time.monotonic() - record.submitted_at) * _NS)
        attributes: dict[str, AttributeValue] = {
            "baton.request_id": record.name,
            "gen_ai.usage.input_tokens": record.num_tokens,
            "gen_ai.usage.output_tokens": end.completion_tokens,
            "gen_ai.response.finish_reasons": (end.outcome,),
            "baton.cached_tokens": end.cached_tokens,
        }
        if end.ttft_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = end.ttft_s
        request = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, attributes, start_time=begin_ns
        )
        if end.outcome not in _SUCCESS:
            request.set_status(Status(StatusCode.ERROR, end.outcome))
        waiting_since = record.submitted_at
        for number, placed in enumerate(record.placed, start=1):
            attempt = timeline(placed, waiting_since, record.submitted_at, lambda _: None)
            self._attempt(request, number, _parts(placed, attempt), attempt, begin_ns)
            waiting_since = placed.at if placed.ended_at is None else placed.ended_at
        if not record.placed:
            queue = _Part("queue", 0.0, end.total_s)
            self._span(request, queue, begin_ns, {}).end(begin_ns + round(end.total_s * _NS))
        request.end(begin_ns + round(end.total_s * _NS))

    def _attempt(
        self,
        request: Span,
        number: int,
        parts: list[_Part],
        attempt: AttemptTimeline,
        begin_ns: int,
    ) -> None:
        for part in parts:
            span = self._span(request, part, begin_ns, {"baton.attempt": number})
            if part is parts[-1]:
                for stall in attempt.decode.stalls if attempt.decode else ():
                    tokens = {"baton.prompt_tokens": stall.prompt_tokens}
                    span.add_event("stall", tokens, begin_ns + round(stall.at_s * _NS))
                for away in attempt.preemptions:
                    span.add_event("preemption", None, begin_ns + round(away.at_s * _NS))
                if attempt.outcome not in _SUCCESS:
                    span.set_status(Status(StatusCode.ERROR, attempt.outcome))
            span.end(begin_ns + round((part.at_s + part.duration_s) * _NS))

    def _span(
        self, request: Span, part: _Part, begin_ns: int, attributes: Mapping[str, AttributeValue]
    ) -> Span:
        return self._tracer.start_span(
            part.name,
            set_span_in_context(request),
            attributes={**attributes, **part.attributes},
            start_time=begin_ns + round(part.at_s * _NS),
        )


def open_tracing(endpoint: str) -> Tracing:
    """Return a tracing that exports to an OTLP collector over HTTP.

    `endpoint` is its base URL; if it is empty, the standard OTEL_EXPORTER_OTLP_* variables apply.
    """
    path = "" if endpoint.endswith(TRACES_PATH) else TRACES_PATH
    return Tracing(OTLPSpanExporter(endpoint.rstrip("/") + path if endpoint else None))


def _parts(placed: Placed, attempt: AttemptTimeline) -> list[_Part]:
    """Return the parts of an attempt as far as it got; the last one is where it ended."""
    end_s, first_s = attempt.at_s + (attempt.duration_s or 0.0), attempt.first_token_s
    prefiller: dict[str, AttributeValue] = {
        "baton.worker": worker_name(placed.prefill or placed.decode) or ""
    }
    decoder: dict[str, AttributeValue] = {"baton.worker": worker_name(placed.decode) or ""}
    parts = [_Part("queue", attempt.at_s - attempt.queue_s, attempt.queue_s)]
    if (prefill := attempt.prefill) is not None:
        parts.append(
            _Part(
                "prefill",
                prefill.at_s,
                prefill.duration_s,
                {**prefiller, "baton.chunks": prefill.num_chunks},
            )
        )
    else:
        read_s = end_s if first_s is None else first_s
        parts.append(_Part("prefill", attempt.at_s, read_s - attempt.at_s, prefiller))
    if (transfer := attempt.transfer) is not None:
        sizes = {"baton.kv_bytes": transfer.bytes, "baton.segments": transfer.num_segments}
        parts.append(_Part("kv_transfer", transfer.at_s, transfer.duration_s, {**decoder, **sizes}))
    if (decode := attempt.decode) is not None:
        steps = {"baton.steps": decode.num_steps, "baton.step_p99_s": decode.step_p99_s}
        parts.append(_Part("decode", decode.at_s, decode.duration_s, {**decoder, **steps}))
    elif first_s is not None and end_s > first_s:
        parts.append(_Part("decode", first_s, end_s - first_s, decoder))
    return parts
