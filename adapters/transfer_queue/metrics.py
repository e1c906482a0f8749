"""The drop-in's Prometheus endpoint: ``GET /metrics`` of its server, at the loopback of the server's machine.

It shows counts, sizes and the names of tables to whoever may open a connection on that machine, so it is there only if the
configuration asks for it. One request at a time, and a peer that is silent for `PATIENCE_S` is left.
"""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

import transferqueue as tq
from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.observe.metrics import CONTENT_TYPE, exposition
from transferqueue.observe.stats import Stats, parse

HOST: Final = "127.0.0.1"
PATIENCE_S: Final = 10.0


class Metrics:
    """An endpoint that answers with what `queue` counts at that moment. port: 0 for a free one.

    `UsageError` for a port that is none, or that cannot be listened at.
    """

    def __init__(self, queue: tq.Queue, port: int = 0) -> None:
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16:
            raise UsageError(f"metrics.port={port!r} is no port; give a number up to 65535, or 0 for a free one")

        class Answer(_Answer):
            shown = queue

        try:
            self._server = HTTPServer((HOST, port), Answer)
        except OSError as error:
            raise UsageError(
                f"metrics.port={port} cannot be listened at ({error}); give another, or 0 for a free one"
            ) from error
        self.address = f"{HOST}:{self._server.server_port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="transfer_queue metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; returns when the request in work is answered. Again: nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        socket.create_connection((HOST, self._server.server_port), PATIENCE_S).close()  # it sleeps until somebody comes
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._server.handle_request()


class _Answer(BaseHTTPRequestHandler):
    shown: tq.Queue
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is /metrics\n")
            return
        try:
            self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(parse("stats", self.shown.stats(), Stats)))
        except TransferQueueError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: what is asked for every few seconds is no news."""
