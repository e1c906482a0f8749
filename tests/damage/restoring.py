"""A restore by the production code into a ledger and an arena, without a loop; and everything that can be asked of what
it made."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.errors import FlowSignal, TransferQueueError, UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.persistence.snapshot import LedgerSnapshot, TableSnapshot, take_snapshot
from transferqueue.limits import MIB
from transferqueue.server.durability.snapshot_files import _placement
from transferqueue.server.durability.snapshots import SnapshotJobs
from transferqueue.server.memory.lending import Lending
from transferqueue.server.memory.own_memory import OwnShardMemory
from transferqueue.storage.columns.column import Column
from transferqueue.storage.memory.arena import Arena
from transferqueue.wire import messages as m

ENDED_S: Final = 60.0
NOW: Final = 1000.0
AGES: Final = ("age_s", "left_s")


class Restorer:
    """Restores snapshots under `root`, each into an empty ledger over the same arena."""

    def __init__(self, root: Path, arena_bytes: int = 16 * MIB) -> None:
        self.root = root
        self.asked = 100
        self.arena = Arena.create(None, arena_bytes)
        fd = os.open(self.arena.path, os.O_RDWR)
        self.bytes = np.frombuffer(mmap.mmap(fd, self.arena.capacity, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        os.close(fd)
        self.begin()

    def begin(self) -> None:
        """An empty ledger with a client, who has a grant."""
        self.ledger = Ledger()
        self.ledger.open_session(1, b"c" * 16, NOW)
        self.memory = OwnShardMemory(self.arena)
        offset, nbytes = self.memory.take(100) or (0, 0)
        self.ledger.grant(1, 0, offset, nbytes, NOW, call=1)
        self._stirred = threading.Event()
        self.snapshots = SnapshotJobs(
            self.root, self.ledger, Lending(self.memory), wake=lambda _: None, stir=lambda: self._stirred.set()
        )

    def restore(self, path: str) -> TransferQueueError | None:
        """Restore one; the error that a client would get."""
        try:
            self.asked += 1
            work = self.snapshots.restore(1, self.asked, path)
            assert isinstance(work, m.JobProgress)
            while not work.ended:
                assert self._stirred.wait(ENDED_S), f"the restore of {path} does not end"
                self._stirred.clear()
                self.snapshots.tick(NOW)
                answer = self.snapshots.watch(m.WatchJob(work.work, wait_s=0.0))
                assert isinstance(answer, m.JobProgress)
                work = answer
        except TransferQueueError as error:
            return error
        return None

    # ------------------------------------------------------------ what is there

    def state(self) -> bytes:
        """The whole ledger, and the bytes lent."""
        return self.ledger.image() + str((self.memory.used, self.memory.extents)).encode()

    def contents(self) -> dict[str, Any]:
        """Terms, counts, rows and values of every field, as plain values; ages left out. Reads every column."""
        cut = take_snapshot(self.ledger.state)
        tables = {table.terms.name: self._table(cut, table) for table in cut.tables}
        channels = {
            one.name: [
                one.keep,
                one.latest,
                [[v.version, self._weights(cut, v.fields, v.blocks)] for v in one.versions],
            ]
            for one in cut.channels
        }
        return {"tables": tables, "channels": channels, "dropped": cut.dropped_tables}

    def _table(self, cut: LedgerSnapshot, table: TableSnapshot) -> dict[str, Any]:
        fields = {field.name: field for field in table.terms.fields}
        values: dict[str, Any] = {}
        for name, (blocks, slots) in table.places.items():
            there = blocks > 0
            placement = _placement(fields, blocks[there], slots[there].astype(np.int64), cut, self._view)
            column = Column(fields[name], placement)
            assert column.arrow().validate(full=True) is None
            assert len(column.lengths) == int(there.sum())
            values[name] = [there.tolist(), column.list()]
        columns = {"rows": table.rows, "groups": table.groups, **table.tasks, **table.forming}
        return {
            "terms": msgspec.to_builtins(table.terms),
            "counts": msgspec.to_builtins(table.counts, str_keys=True),
            "values": values,
            "inline": {name: column[table.has[name]].tolist() for name, column in table.inline.items()},
            "has": {name: column.tolist() for name, column in table.has.items()},
            "keys": table.keys,
            "tags": table.tags,
            "ordinals": table.ordinals.tolist(),
            **{
                f"columns {name}": {key: one.tolist() for key, one in each.items() if key not in AGES}
                for name, each in columns.items()
            },
        }

    def _weights(self, cut: LedgerSnapshot, fields: list[Any], blocks: list[int]) -> list[Any]:
        known = {field.name: field for field in fields}
        found = []
        for number in blocks:
            at = np.array([number], np.int64)
            placement = _placement(known, at, np.zeros(1, np.int64), cut, self._view)
            found += [[name, Column(known[name], placement).list()] for name in cut.blocks[number].fields]
        return sorted(found, key=lambda one: str(one[0]))

    def _view(self, at: m.BlockLocation) -> np.ndarray[Any, Any]:
        return self.bytes[at.offset : at.offset + at.nbytes]

    def digest(self) -> str:
        """Of `contents`."""
        return hashlib.blake2b(json.dumps(self.contents(), sort_keys=True, default=repr).encode()).hexdigest()

    def use(self) -> None:
        """Work with it: lease and ack in every task, seal, drop. Raises what no request may raise; the books balance
        throughout."""
        call = 10
        for name, table in list(self.ledger.state.tables.items()):
            requests: list[m.Request] = [m.Observe("stats"), m.Observe("doctor"), m.Cursor(name), m.ReadRequest(name)]
            for task, state in table.tasks.items():
                by = {"groups": 2} if state.task.groups else {"rows": 8}
                requests += [
                    m.Rollback(name, state.counters.checkpoint),
                    m.LeaseRequest(name, task, **by),
                    m.LeaseRequest(name, task, **by),
                ]
            requests += [m.Seal(name), m.DropTable(name)]
            for request in requests:
                call += 1
                reply = self._ask(request, call)
                if isinstance(reply, m.Leased):
                    self._ask(m.Ack(name, reply.lease, reply.token), call := call + 1)
                assert self.ledger.observe(m.Observe("audit"), NOW).balanced, f"after {request}"
        self.ledger.close_session(1, NOW)
        for effect in self.ledger.take_effects():
            if hasattr(effect, "offset"):
                self.memory.give_back(effect.offset, effect.nbytes, NOW)
        kept = sum(one.usage.bytes for one in self.ledger.state.channels.values())
        assert bool(self.memory.used) == bool(kept), f"{self.memory.used} bytes are still lent"

    def _ask(self, request: m.Request, call: int) -> Any:
        try:
            if isinstance(request, m.Observe):
                return self.ledger.observe(request, NOW)
            return self.ledger.apply(request, session=1, call=call, now=NOW)
        except (FlowSignal, UsageError) as error:
            return error
