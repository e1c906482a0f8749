"""The thread of a shard process that reports to the coordinator what its disk has done.

The rules (docs/decisions/0059):

- A report is sent until it is answered. The coordinator ignores what it has heard before.
- If the coordinator refuses a report, it and the shard do not agree on what is on the disk. Then the shard ends, and its blocks are lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Final

from transferqueue.client.session.connection import Connection
from transferqueue.errors import DeadlineExceeded, Disconnected, TransferQueueError, Unreachable
from transferqueue.limits import COPY_RETRY_S, SPILL_REPORTS_MAX
from transferqueue.server.spill.spill_file import SpillAnswers, SpillFile
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.shard")
JOIN_S: Final = 10.0
"""A call ends with its connection; so the thread has ended by then."""


class SpillReports:
    """Reports what `disk` has done, from `start` to `stop`. stirred: is set after each answer of the disk."""

    def __init__(self, connection: Connection, disk: SpillFile, stirred: threading.Event) -> None:
        self._connection, self._disk, self._stirred = connection, disk, stirred
        self._stopping: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="transferqueue spill reports", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end soon. Close the connection, and then `join`."""
        self._stopping.set()
        self._stirred.set()

    def join(self) -> None:
        """Wait until the thread has ended, if it was started."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._stirred.wait()
                self._stirred.clear()
                for report in _reports(self._disk.answers()):
                    self._send(report)
        except Disconnected:
            return
        except TransferQueueError as error:
            _log.error("the coordinator refused what the disk has done, and the shard ends: %s", error)
            self._connection.close()

    def _send(self, report: m.ReportSpill) -> None:
        while not self._stopping.is_set():
            try:
                self._connection.call(report)
            except (Unreachable, DeadlineExceeded) as error:
                _log.warning("the coordinator does not answer: %s", error)
                self._stopping.wait(COPY_RETRY_S)
            else:
                return


def _reports(answers: SpillAnswers) -> Iterator[m.ReportSpill]:
    """The answers in reports, of `SPILL_REPORTS_MAX` of each kind at most."""
    for first in range(0, max(len(answers.written), len(answers.loaded)), SPILL_REPORTS_MAX):
        end = first + SPILL_REPORTS_MAX
        yield m.ReportSpill(answers.written[first:end], answers.loaded[first:end])
