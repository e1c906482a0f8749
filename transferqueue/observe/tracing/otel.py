"""Row traces as OpenTelemetry spans. The SDK samples, batches and exports them, by its ``OTEL_`` variables.

Needs the extra ``[tracing]``.
"""

from __future__ import annotations

from collections.abc import Mapping

from transferqueue.lazy import naming_extra
from transferqueue.observe.tracing.row_trace import LeaseSpan, RowTrace

with naming_extra("tracing"):
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

Attributes = dict[str, str | int]


def tracer_provider(*, console: bool) -> TracerProvider:
    """A provider that sends spans over OTLP/HTTP, or with `console` prints them to standard output.

    ``OTEL_EXPORTER_OTLP_ENDPOINT`` (default ``http://localhost:4318``) and the other variables of the SDK set the
    collector, headers, service name (default ``transferqueue``) and sampler.
    """
    resource = Resource.create({"service.name": "transferqueue"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter() if console else OTLPSpanExporter()))
    return provider


class SpanExport:
    """Makes a trace of spans of each row that ended; an `Export` of `RowFollower`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __call__(self, trace: RowTrace, names: Mapping[int, str]) -> None:
        """Start and end the spans of this row, with their own times. names: of sessions, by number."""
        root = self._tracer.start_span(
            f"{trace.table} row", Context(), attributes=_of_row(trace, names), start_time=_ns(trace.began_s)
        )
        for mark in trace.marks:
            attributes = {"transferqueue.task": mark.task, "transferqueue.detail": mark.detail}
            root.add_event(mark.what, {name: text for name, text in attributes.items() if text}, _ns(mark.at_s))
        inside = set_span_in_context(root, Context())
        for lease in trace.leases:
            self._add_lease(trace, lease, inside, names)
        root.end(_ns(trace.ended_s))

    def _add_lease(self, trace: RowTrace, lease: LeaseSpan, inside: Context, names: Mapping[int, str]) -> None:
        span = self._tracer.start_span(
            f"{trace.table} {lease.task}",
            inside,
            SpanKind.CONSUMER,
            {
                "transferqueue.table": trace.table,
                "transferqueue.row": trace.row,
                "transferqueue.task": lease.task,
                "transferqueue.worker": _name(lease.worker, names),
                "transferqueue.outcome": lease.outcome,
                "transferqueue.detail": lease.detail,
            },
            start_time=_ns(lease.began_s),
        )
        if lease.failed:
            span.set_status(Status(StatusCode.ERROR, lease.outcome))
        span.end(_ns(lease.ended_s))


def _of_row(trace: RowTrace, names: Mapping[int, str]) -> Attributes:
    return {
        "transferqueue.table": trace.table,
        "transferqueue.row": trace.row,
        "transferqueue.put_by": _name(trace.put_by, names),
        "transferqueue.state": trace.state,
        "transferqueue.reason": trace.reason,
        "transferqueue.omitted": trace.omitted,
    }


def _name(session: int, names: Mapping[int, str]) -> str:
    return names.get(session, f"session {session}" if session else "")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
