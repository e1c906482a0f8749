"""The state of a coordinator: its ledger, its memory, its sessions and what waits there, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from transferqueue.ledger.ledger import Ledger
from transferqueue.server.loop_latency import Turns
from transferqueue.server.memory.lending import Lending
from transferqueue.server.parts import Parts
from transferqueue.server.sessions.session_table import SessionTable, Workers
from transferqueue.server.sessions.waiting import WaitQueue
from transferqueue.wire.home_coordinator import CoordinatorIndex


class ServerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of this run of a server. It removes unlocked session files from `lock_directory`."""

    epoch: int
    address: str
    runtime: str
    version: str
    pid: int
    started_at: float
    lock_directory: Path | None = None


class Counters:
    """Events since the server started, for `stats`. Each counter only grows."""

    def __init__(self) -> None:
        self.calls = 0
        self.garbage = 0
        self.unauthenticated_peers = 0
        self.repeated = 0
        self.leases_ended = 0
        self.sessions_dropped = 0
        self.internal_errors = 0


@dataclass(frozen=True, slots=True)
class ServerState:
    """See the module. `turns` is filled by the loop, which has the clock."""

    identity: ServerIdentity
    index: CoordinatorIndex
    ledger: Ledger
    lending: Lending
    sessions: SessionTable
    waiting: WaitQueue
    workers: Workers
    counters: Counters
    turns: Turns
    parts: Parts
