"""The drop-in's Prometheus endpoint: ``GET /metrics`` at the loopback address of the server's machine.

An answer has the same text as `/metrics` of ``serve --web``, and beside it those metrics of the original that mean
something here, by the original's names, so that its dashboard shows them. `observe.prometheus` writes both, at the
scrape.

Anyone who may open a connection on that machine sees counts, sizes and the names of tables, so the endpoint exists only
if the configuration enables it. At most `OPEN_MAX` connections are open: a further one closes the oldest, so peers that
send incomplete or slow requests block no others. A connection that is silent for `PATIENCE_S` is closed.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import transferqueue as tq
from transferqueue.adapters.transfer_queue.samples.tags import partition_of
from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.observe.prometheus import CONTENT_TYPE, Family, Sample, exposition
from transferqueue.wire.answers.stats import Stats

HOST: Final = "127.0.0.1"
PATIENCE_S: Final = 10.0
OPEN_MAX: Final = 16
"""Each connection is a thread, for the milliseconds of an answer."""

Consumed = Callable[[], Mapping[str, Mapping[str, int]]]
"""Returns how many samples each task has consumed, by partition."""
_STORAGE_UNIT: Final = (("storage_unit_id", "server"),)


def original_names(stats: Stats, consumed: Mapping[str, Mapping[str, int]]) -> Iterator[Family]:
    """Yield the metrics of the original. All are gauges, as there.

    Progress is a part of the samples that the partition has now, from 0 to 1; a partition without samples has none.
    """
    tables = {name: table for held, table in stats.tables.items() if (name := partition_of(held)) is not None}
    resident = {name: table.rows_resident for name, table in tables.items()}
    active, capacity = sum(resident.values()), max((table.rows_limit for table in tables.values()), default=0)
    progress: list[Sample] = [
        ((("partition_id", name), ("task_name", task)), min(1.0, count / resident[name]))
        for name, tasks in consumed.items()
        for task, count in tasks.items()
        if resident.get(name)
    ]
    by_partition: list[Sample] = [((("partition_id", name),), rows) for name, rows in resident.items()]
    yield _gauge("controller_uptime_seconds", "Age of the server.", [((), stats.server.uptime_s)])
    yield _gauge("partitions_total", "Partitions.", [((), len(tables))])
    yield _gauge("partition_samples_total", "Samples of a partition.", by_partition)
    yield _gauge("partition_consumption_progress", "Part of the samples that a task has consumed.", progress)
    yield _gauge("storage_active_keys_total", "Samples of all partitions.", [(_STORAGE_UNIT, active)])
    if capacity:
        yield _gauge("storage_capacity_total", "Samples that a partition may hold.", [(_STORAGE_UNIT, capacity)])


def _gauge(name: str, help: str, samples: Sequence[Sample]) -> Family:  # noqa: A002
    return Family(name, "gauge", help, samples, prefix="tq")


class Metrics:
    """An endpoint that answers with the current statistics of `queue`. `port` 0 is a free one. `consumed` is called at
    each scrape.

    Raises `UsageError` for an invalid port, or one that is in use.
    """

    def __init__(self, queue: tq.Queue, port: int = 0, consumed: Consumed = dict) -> None:
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16:
            raise UsageError(f"metrics.port={port!r} is no port; give a number up to 65535, or 0 for a free one")

        class OfQueue(_Handler):
            shown = queue
            consumption = staticmethod(consumed)

        try:
            self._server = _Server((HOST, port), OfQueue)
        except OSError as error:
            raise UsageError(
                f"metrics.port={port} cannot be listened at ({error}); give another, or 0 for a free one"
            ) from error
        self.address = f"{HOST}:{self._server.server_port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="transfer_queue metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; return when the current request is answered. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        socket.create_connection((HOST, self._server.server_port), PATIENCE_S).close()  # it waits for a connection
        self._thread.join()
        self._server.end_reading()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._server.handle_request()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, with a bound on their number."""

    daemon_threads = False  # closing waits for them
    request_queue_size = 128  # a connection that finds no room there is tried again only after a second

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a new connection; closes the oldest if there are too many."""
        with self._lock:
            if len(self._open) >= OPEN_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _end(oldest, socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore peers that went away or were closed for others."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def end_reading(self) -> None:
        """Answer one request, and wait for no other."""
        with self._lock:
            for request in self._open:
                _end(request, socket.SHUT_RD)


def _end(connection: socket.socket, how: int) -> None:
    with suppress(OSError):  # the peer was quicker
        connection.shutdown(how)


class _Handler(BaseHTTPRequestHandler):
    shown: tq.Queue
    consumption: Consumed
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is /metrics\n")
            return
        try:
            stats = self.shown.stats()
            theirs = original_names(stats, type(self).consumption())
            self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(stats, theirs))
        except TransferQueueError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: scrapes come every few seconds."""
