"""Traces of rows as OpenTelemetry spans: by the SDK's exporter in memory, and over OTLP to a collector.
`make test-others` runs it.

Skipped where the extra ``[tracing]`` is not installed.
"""

from __future__ import annotations

import gzip
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import transferqueue as tq
from transferqueue.observe.tracing.follower import RowFollower

pytest.importorskip("opentelemetry.sdk", reason="needs the extra [tracing]: make test-others")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from transferqueue.observe.tracing.otel import SpanExport

GENEROUS_S = 60


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded", arena_bytes="16MiB", label="maker") as found:
        yield found


def table_of(queue: tq.Queue) -> tq.Table:
    return queue.create_table(
        "rollouts",
        tasks=[
            tq.Task("reward", needs=["text"], gives=["reward"]),
            tq.Task("train", needs=["reward"], groups=tq.Complete()),
        ],
    )


def one_way(table: tq.Table) -> None:
    """Two rows of a group: one is given back once, both are trained."""
    table.put(text=["one", "two"], group_id=0, group_size=2)
    table.lease("reward", rows=1).release(failed=True, reason="the judge is down")
    table.lease("reward", rows=2).ack(reward=[1.0, 2.0])
    table.lease("train", rows=2).ack()


def spans_of(queue: tq.Queue) -> list[ReadableSpan]:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    follower = RowFollower(queue, SpanExport(provider.get_tracer("transferqueue")), every=1)
    follower.look()
    one_way(table_of(queue))
    follower.look()
    return list(memory.get_finished_spans())


def test_a_row_is_one_trace_and_each_lease_a_span_in_it(queue: tq.Queue) -> None:
    spans = spans_of(queue)
    roots = {span.attributes["transferqueue.row"]: span for span in spans if span.parent is None}
    assert sorted(roots) == [0, 1]
    assert {span.name for span in roots.values()} == {"rollouts row"}
    assert roots[0].context.trace_id != roots[1].context.trace_id
    of_row = {
        row: [span for span in spans if span.parent and span.parent.span_id == root.context.span_id]
        for row, root in roots.items()
    }
    assert [span.name for span in of_row[0]] == ["rollouts reward", "rollouts reward", "rollouts train"]
    assert [span.name for span in of_row[1]] == ["rollouts reward", "rollouts train"]
    for row, leases in of_row.items():
        for span in leases:
            assert span.context.trace_id == roots[row].context.trace_id
            assert roots[row].start_time <= span.start_time <= span.end_time <= roots[row].end_time


def test_a_failed_lease_is_an_error_and_says_why(queue: tq.Queue) -> None:
    (failed,) = [span for span in spans_of(queue) if span.status.status_code is StatusCode.ERROR]
    assert (failed.attributes["transferqueue.outcome"], failed.attributes["transferqueue.detail"]) == (
        "failed",
        "the judge is down",
    )
    assert failed.attributes["transferqueue.worker"] == "maker"


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted to it, as a collector of OTLP over HTTP gets it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.requests = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def trace(address: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    """`transferqueue trace` of every row, once it follows."""
    command = [
        sys.executable,
        "-m",
        "transferqueue.cli",
        "trace",
        address,
        "--every",
        "1",
        "--interval",
        "0.05",
        *words,
    ]
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("following 1 row in 1 of ipc://")
    return process


@pytest.mark.slow
def test_the_command_sends_traces_to_a_collector(queue: tq.Queue, collector: Any) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    process = trace(queue.address, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_SERVICE_NAME="my-job")
    one_way(table_of(queue))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=GENEROUS_S)
    assert (process.returncode, err) == (0, "2 traces sent\n")
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    (sent,) = [resource for _, request in collector.requests for resource in request.resource_spans]
    assert {one.key: one.value.string_value for one in sent.resource.attributes}["service.name"] == "my-job"
    assert sorted(span.name for scope in sent.scope_spans for span in scope.spans) == sorted(
        ["rollouts row", "rollouts reward", "rollouts train"] * 2 + ["rollouts reward"]
    )


@pytest.mark.slow
def test_the_command_prints_spans_without_a_collector(queue: tq.Queue) -> None:
    process = trace(queue.address, "--console")
    one_way(table_of(queue))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=GENEROUS_S)
    assert (process.returncode, err) == (0, "2 traces sent\n")
    names, decoder, at = [], json.JSONDecoder(), 0
    while at < len(out.rstrip()):
        span, end = decoder.raw_decode(out, at)
        names.append(span["name"])
        at = end + len(out[end:]) - len(out[end:].lstrip())
    assert names.count("rollouts row") == 2
