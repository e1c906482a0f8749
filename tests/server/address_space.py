"""A server that runs out of address space, and what each row says of it: a model by row id, which knows nothing of the
ledger.

The limit is set on a server that runs: what it has mapped, and some MiB more. So the same headroom means the same on
every machine.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import transferqueue as tq
from transferqueue.errors import EndOfTable, FlowSignal, Full, InternalError, PeerError
from transferqueue.limits import MIB

ARENA_BYTES = 32 * MIB
PATIENCE_S = 3.0


@dataclass
class Outcome:
    """What the clients were answered. refused: texts of `Full`. ended: the exit code of the server under the limit;
    None: it lived."""

    put: dict[int, int] = field(default_factory=dict)
    """Row -> its number, of confirmed puts."""
    acked: set[int] = field(default_factory=set)
    """Rows of confirmed acks."""
    asked: set[int] = field(default_factory=set)
    """Rows of acks that were sent."""
    updated: set[int] = field(default_factory=set)
    """Rows of confirmed updates, which gave each its own id with a minus."""
    refused: list[str] = field(default_factory=list)
    ended: int | None = None


class LimitedServer:
    """A server of this level in `directory`. Call `limit` when it runs."""

    def __init__(self, directory: Path, level: str) -> None:
        self.address = f"ipc://{directory}/q.sock"
        durable = [] if level == "memory" else ["--durability", level, "--state", str(directory / "state")]
        self._command = [sys.executable, "-m", "transferqueue.server", "--address", self.address, *durable]
        self._command += ["--arena-bytes", str(ARENA_BYTES)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready"), self.process.communicate()

    def limit(self, headroom: int | None) -> None:
        """Let the server map so many bytes more; None: as many as it likes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[0])
        _, most = resource.prlimit(self.process.pid, resource.RLIMIT_AS)
        least = most if headroom is None else pages * resource.getpagesize() + headroom
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, (least, most))

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def work(server: LimitedServer, headroom: int, rows: int, at_once: int) -> Outcome:
    """Put `rows` rows, lease, update and ack them under the limit, until all is done or the server ends."""
    out = Outcome()
    with suppress(PeerError), tq.connect(server.address) as queue:
        table = queue.create_table(
            "t", tasks=[tq.Task("work", needs=["n"], lease_s=600.0)], limits=tq.Limits(rows=1 << 20)
        )
        server.limit(headroom)
        for act in _acts(table, out, rows, at_once):
            try:
                act()
            except Full as error:
                out.refused.append(str(error))
            except (PeerError, InternalError, FlowSignal):
                if server.process.poll() is not None:
                    break
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(0.2)
    out.ended = server.process.poll()
    return out


def _acts(table: tq.Table, out: Outcome, rows: int, at_once: int) -> Iterator[Callable[[], object]]:
    for first in range(0, rows, at_once):
        yield lambda first=first: _put(table, out, first, at_once)
        yield lambda: _lease(table, out, at_once // 2)


def _put(table: tq.Table, out: Outcome, first: int, count: int) -> None:
    numbers = np.arange(first, first + count)
    keys = [f"key of row {number}" for number in numbers]
    rows = table.put(n=numbers, key=keys, timeout_s=PATIENCE_S)
    out.put.update(zip(rows.tolist(), numbers.tolist(), strict=True))


def _lease(table: tq.Table, out: Outcome, count: int) -> None:
    batch = table.lease("work", rows=count, at_least=1, timeout_s=0.2)
    rows = batch.rows
    half = rows[: len(rows) // 2]
    table.update(half, overwrite=True, m=-half)
    out.updated.update(half.tolist())
    done = rows[::3]
    out.asked.update(done.tolist())
    batch.ack(done)
    out.acked.update(done.tolist())
    batch.release()


def judge(server: LimitedServer, out: Outcome) -> list[str]:
    """What is wrong with the rows of a server without a limit, by row id. Takes all that are left."""
    with tq.connect(server.address) as queue:
        audit = queue.audit()
        table = queue.table("t")
        table.seal()
        left: dict[int, int] = {}
        values: dict[int, int] = {}
        with suppress(EndOfTable):
            while True:
                batch = table.lease("work", rows=20_000, at_least=1, timeout_s=30)
                left.update(zip(batch.rows.tolist(), np.asarray(batch["n"]).tolist(), strict=True))
                updated = [row for row in batch.rows.tolist() if row in out.updated]
                if updated:
                    read = table.read(updated, fields=["m"])
                    values.update(zip(updated, np.asarray(read["m"]).tolist(), strict=True))
                batch.ack()
        stats = table.stats()
    done = set(range(stats.rows_put)) - set(left)
    found = {
        "done that no worker acked": done - out.asked,
        "confirmed acks that came again": out.acked & set(left),
        "confirmed puts that are gone": {row for row in out.put if row >= stats.rows_put},
        "rows with numbers of others": {row for row, number in left.items() if out.put.get(row, number) != number},
        "rows without a confirmed update": {row for row in left.keys() & out.updated if values[row] != -row},
    }
    wrong = [f"{len(rows)} {what}: {sorted(rows)[:5]}" for what, rows in found.items() if rows]
    if len(set(left.values())) < len(left):
        wrong.append("a number is in two rows")
    return wrong if audit.balanced else [*wrong, "the books do not balance"]
