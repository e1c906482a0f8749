"""The simulated server machine: production coordinator, ledger and recovery over a simulated disk, arena and kernel.

The server may crash at every point that makes a difference to other processes: before a commit, within it (its
record is torn: recovery must not see it), after it and before the answers leave, between two answers, or because the
disk is full. The disk and the arena's bytes outlive the crash; all else is lost, and the next server recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tests.simulator.interrupts import DEFECTS, Interrupt
from tests.simulator.spill import SimSpill
from tests.simulator.world import World
from transferqueue.errors import JournalFailed, LedgerTorn, UsageError
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.rows.blocks import ExtentState
from transferqueue.limits import SIZE_BYTES_MAX, WAITERS_AT_ONCE
from transferqueue.server.coordinator import Coordinator
from transferqueue.server.durability.recorded_ledger import RecordedLedger, replay_journal
from transferqueue.server.memory.own_memory import SHARD, OwnShardMemory
from transferqueue.server.parts import Part
from transferqueue.server.process.resume import resume_sessions
from transferqueue.server.sessions.authorization import Authorizer
from transferqueue.server.sessions.liveness import ProcessHandle
from transferqueue.server.sessions.session_table import Peer
from transferqueue.server.shards.part import Shards
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.server.spill.spilling import Spilling
from transferqueue.server.state import ServerIdentity
from transferqueue.storage.memory.allocator import Allocator
from transferqueue.wire import messages as m
from transferqueue.wire.roles import Role

TICKET_KEY: Final = bytes(32)
_NO_DESCRIPTOR: Final = 1 << 30
"""More than a process may have open."""
"""Not random, so that a seed takes the same course each time."""


SLEEPLESS_MAX: Final = 20
"""So many ticks in a row may leave something that is due, as a tick does that reserves some pages ahead of use. A
server that goes on so never sleeps."""


class PromiseBroken(Exception):
    """A promise was broken; the text says which."""


class Crashed(Exception):
    """The simulated server ends at this point."""


class Disk:
    """A disk, which outlives the server: an image, and the commits after it, each whole or torn."""

    def __init__(self) -> None:
        self.image: bytes | None = None
        self.commits: list[tuple[list[bytes], bool]] = []


class SimJournal:
    """A journal on a `Disk`. See `server.durability.journal.Journal`."""

    def __init__(self, disk: Disk, world: World) -> None:
        self._disk, self._world = disk, world
        self._pending: list[bytes] = []

    def append(self, record: bytes) -> None:
        """See `Journal.append`."""
        self._pending.append(record)

    def commit(self) -> None:
        """See `Journal.commit`. May crash before, within and after."""
        if not self._pending:
            return
        world, rates = self._world, self._world.rates
        if world.strikes(rates.full, "disk full"):
            raise JournalFailed("the simulated disk is full; make room and start the server again")
        if world.strikes(rates.before_commit, "server crashed before a commit"):
            raise Crashed
        if world.strikes(rates.torn, "torn write"):
            self._disk.commits.append((self._pending[: world.random.randrange(len(self._pending) + 1)], False))
            raise Crashed
        self._disk.commits.append((self._pending, True))
        self._pending = []
        if world.strikes(rates.after_commit, "answers lost after a commit"):
            raise Crashed

    def checkpoint(self, image: bytes) -> None:
        """See `Journal.checkpoint`."""
        self._disk.image, self._disk.commits, self._pending = image, [], []

    def load(self) -> tuple[bytes | None, Iterable[bytes]]:
        """See `Journal.load`. A torn commit ends the journal and is left out."""
        self._disk.commits = [(records, True) for records, whole in self._disk.commits if whole]
        return self._disk.image, [record for records, _ in self._disk.commits for record in records]

    def close(self) -> None:
        """See `Journal.close`."""
        self._pending = []


class SimArena:
    """An arena in one bytearray. in_sight: returns the ranges that a process may still read or write."""

    path: Final = "simulated"
    held: Final = False
    """No device has registered pages of it."""

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self.backed: Final = capacity
        self.bytes: Final = bytearray(capacity)
        self.in_sight: Callable[[], Iterable[tuple[int, int, str]]] = tuple

    def ensure(self, offset: int, nbytes: int) -> None:
        """`OwnShardMemory` grants [offset, offset + nbytes). `PromiseBroken` if another process still views part of
        it."""
        for start, size, who in self.in_sight():
            if start < offset + nbytes and offset < start + size:
                raise PromiseBroken(
                    f"bytes [{offset}, {offset + nbytes}) are lent while {who} still sees [{start}, {start + size})"
                )

    def grow(self, start: int, end: int) -> bool:
        """Does nothing: all pages exist."""
        return False

    def trim(self, allocator: Allocator) -> int:
        """Does nothing: no pages return to the system."""
        return 0


def pidfd_of(number: int) -> int:
    """What stands for a descriptor of a simulated process: no descriptor of this one, which the server would duplicate,
    and read."""
    return number + _NO_DESCRIPTOR


class SimEvidence(ProcessHandle):
    """The answers of the simulated kernel about one process."""

    def __init__(self, number: int, lives: Callable[[int], bool]) -> None:
        self._number, self._lives = number, lives
        self._watched = True

    @property
    def pidfd(self) -> int:
        """See `ProcessHandle`."""
        return pidfd_of(self._number) if self._watched else -1

    @property
    def is_local(self) -> bool:
        """See `ProcessHandle`."""
        return True

    def may_see_memory(self) -> bool:
        """See `ProcessHandle`."""
        return self._lives(self._number)

    def forget_process(self) -> None:
        """See `ProcessHandle`."""
        self._watched = False

    def close(self, lock_directory: object = None) -> None:
        """See `ProcessHandle`."""
        self.forget_process()


class SimAuthorizer(Authorizer):
    """Each process has a key of its own, and may do everything until that is withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.withdrawn: Final[set[int]] = set()
        """Numbers of processes."""

    def role(self, peer: Peer) -> Role | None:
        """See `Authorizer`."""
        number = int(peer.partition(b".")[0]) if isinstance(peer, bytes) and peer else -1
        return None if number in self.withdrawn else "admin"


class SimDurability(Part):
    """Durability of the simulated server; see `Part` and `process.resume.PreviousRun`. A full disk ends it."""

    rebooted: Final = False

    def __init__(self, ledger: RecordedLedger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self.clock = clock

    def commit(self) -> None:
        """See `Part`."""
        self._ledger.commit()

    def damaged(self) -> list[int]:
        """None: the machine did not go down."""
        return []


def own_extents(ledger: Ledger) -> list[ExtentState]:
    """Those in the server's own arena."""
    return ledger.extents_of(SHARD)


def _check_idle(node: Coordinator) -> None:
    """A turn of the server has ended: it left nothing to do, which would wait for whatever happens next."""
    if node.waiting.requests and node.waiting.next_due() is not None:
        raise PromiseBroken("a turn ended, and a request that waits is due; it would be tried with the next event")
    if effects := node.ledger.take_effects():
        raise PromiseBroken(f"a turn ended, and its effects were not applied: {effects}")


ENDS: Final[tuple[type[BaseException], ...]] = (Crashed, JournalFailed, LedgerTorn, *DEFECTS)
"""What ends a server process."""
LINES_MAX: Final = 400
"""Of the ledger, that most events take less of."""


class SimServer:
    """The server of a world, one life after the other. `deliver` brings an answer to a peer. durable: else level
    ``memory``. spills: blocks go to a disk, of `disk_bytes`, which hangs at times if `disk_hangs`; only at that
    level."""

    def __init__(
        self,
        world: World,
        arena_bytes: int,
        lives: Callable[[int], bool],
        *,
        durable: bool,
        spills: bool = False,
        disk_bytes: int = SIZE_BYTES_MAX,
        disk_hangs: bool = False,
    ) -> None:
        self.arena: Final = SimArena(arena_bytes)
        self.disk: Final = Disk()
        self.node: Coordinator | None = None
        self.epoch = 0
        self.deliver: Callable[[bytes, bytes], None] = lambda _peer, _frame: None
        self.on_down: Callable[[], None] = lambda: None
        self.on_up: Callable[[], None] = lambda: None
        self.checked: Callable[[Coordinator], None] = lambda _: None
        self.unread: Final[set[bytes]] = set()
        """Peers that do not read their answers. The server notices when it sends the next one."""
        self._world: Final = world
        self._lives: Final = lives
        self._durable: Final = durable
        self._spills: Final = spills
        self._disk_bytes: Final = disk_bytes
        self._disk_hangs: Final = disk_hangs
        self._behind = 0.0
        self._watched: dict[int, int] = {}
        self._authorizer: Final = SimAuthorizer()
        self._tick_at = -1.0
        self._sleepless = 0

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Start a server from the disk; at level ``memory`` an empty one."""
        self._watched = {}
        if self._durable:
            self._resume()
        else:
            self.epoch += 1
            memory = OwnShardMemory(self.arena)  # type: ignore[arg-type]
            self.node = Coordinator(
                Ledger(epoch=self.epoch),
                memory,
                self._place(),
                watcher=self,
                open_process=self._open_process,
                authorizer=self._authorizer,
            )
            self._reach_shards(self.node)
            self.node.waiters_at_once = WAITERS_AT_ONCE
            if self._spills:
                self._spill(self.node)
        if self.node is not None:
            self.on_up()

    def _reach_shards(self, node: Coordinator) -> None:
        tickets = TicketIssuer(TICKET_KEY)
        node.attach(Shards(node.ledger, node.lending, node.sessions, node.waiting.wake, tickets))

    def _spill(self, node: Coordinator) -> None:
        def stir() -> None:
            if self.node is node:
                self._guarded(lambda node: node.tick(self._clock()))

        space = SimSpill(self._world, self.arena.bytes, stir, self._disk_bytes, hangs=self._disk_hangs)
        node.attach(Spilling(node.ledger, node.memory, space, self._disk_bytes, node.waiting.wake))

    def _resume(self) -> None:
        journal = SimJournal(self.disk, self._world)
        ledger, tail = replay_journal(journal)
        if ledger.epoch:
            self._behind = self._world.now - max(0.0, ledger.now)
        self.epoch = ledger.epoch + 1
        recorded = RecordedLedger(ledger, journal, tail, epoch=self.epoch)
        kept = SimDurability(recorded, self._clock)
        extents = [(one.offset, one.nbytes) for one in own_extents(ledger)]
        allocator = Allocator.holding(self.arena.capacity, extents)
        memory = OwnShardMemory(self.arena, allocator, len(extents))  # type: ignore[arg-type]
        self.node = Coordinator(
            recorded,
            memory,
            self._place(),
            watcher=self,
            open_process=self._open_process,
            authorizer=self._authorizer,
        )
        self.node.attach(kept)
        self._reach_shards(self.node)
        self._guarded(lambda node: resume_sessions(node, kept, self._find_again))

    def _place(self) -> ServerIdentity:
        return ServerIdentity(
            epoch=self.epoch, address="simulated", runtime="", version="0", pid=1, started_at=self._world.now
        )

    def _clock(self) -> float:
        return self._world.now - self._behind

    def kill(self) -> None:
        """End here."""
        if self.node is not None:
            for part in self.node.parts:
                part.stop()
            self.node = None
            self.on_down()
            self._world.after(self._world.random.uniform(0.05, 0.8), self._restart)

    def _restart(self) -> None:
        if self.node is None:
            self._world.faults["server restarted"] += 1
            self.start()

    def _open_process(self, hello: m.Hello) -> ProcessHandle:
        if not self._lives(hello.pid):
            raise UsageError(f"session refused: process {hello.pid} does not exist; send the number of the client")
        return SimEvidence(hello.pid, self._lives)

    def _find_again(self, hello: m.Hello) -> tuple[ProcessHandle | None, bool]:
        return (SimEvidence(hello.pid, self._lives), True) if self._lives(hello.pid) else (None, False)

    # ------------------------------------------------------------ the watcher

    def watch(self, session: int, pidfd: int) -> None:
        """See `Watcher`."""
        self._watched[pidfd] = session

    def unwatch(self, pidfd: int) -> None:
        """See `Watcher`."""
        self._watched.pop(pidfd, None)

    def process_ended(self, number: int) -> None:
        """The kernel reports the end of a process."""
        pidfd = pidfd_of(number)
        self._guarded(
            lambda node: node.process_exited(self._watched[pidfd], self._clock()) if pidfd in self._watched else None
        )

    def connection_lost(self, peer: bytes) -> None:
        """A client closed its connection without Goodbye."""
        self._guarded(lambda node: node.peer_lost(peer, self._clock()))

    def withdraw_keys(self, numbers: Iterable[int]) -> None:
        """The keys of these processes are withdrawn."""
        self._authorizer.withdrawn.update(numbers)
        self._guarded(lambda node: node.keys_changed(self._clock()))

    # ------------------------------------------------------------ the loop

    def receive(self, peer: bytes, frame: bytes) -> None:
        """Take in a frame; it is lost if no server runs."""
        self._guarded(lambda node: node.receive(peer, frame, self._clock()))

    def _tick(self, when: float) -> None:
        if self._tick_at == when:
            self._tick_at = -1.0
            self._guarded(self._tick_all)

    def _tick_all(self, node: Coordinator) -> None:
        now = self._clock()
        node.tick(now)
        due = node.next_deadline()
        self._sleepless = self._sleepless + 1 if due is not None and due <= now else 0
        if self._sleepless > SLEEPLESS_MAX:
            raise PromiseBroken(
                f"{SLEEPLESS_MAX} ticks one after the other left what was due at {due:.6f}, at {now:.6f}"
            )

    def _guarded(self, act: Callable[[Coordinator], object]) -> None:
        node = self.node
        if node is None:
            return
        try:
            self._interrupted(act, node)
            self._send(node)
        except ENDS:
            self.kill()
            return
        if self.node is node:
            _check_idle(node)
            self.checked(node)
            self._sleep(node)

    def _interrupted(self, act: Callable[[Coordinator], object], node: Coordinator) -> None:
        """Have something interrupt the ledger, if this world does that. Whoever comes here then goes on, or ends as a
        server process would."""
        world = self._world
        if world.healed or not world.rates.interrupted or world.random.random() >= world.rates.interrupted:
            act(node)
            return
        defect = Interrupt(world.random.choice(DEFECTS), world.random.randint(1, LINES_MAX))
        try:
            with defect.planted():
                act(node)
        finally:
            world.faults[f"{defect.error.__name__} in the ledger"] += defect.raised
            world.faults["ledger torn"] += node.ledger.torn
        if node.ledger.torn:
            raise PromiseBroken(f"{defect.error.__name__} tore the ledger, and the server goes on")

    def _send(self, node: Coordinator) -> None:
        while node.answers.outbox or node.unfinished:
            node.commit()
            answers, node.answers.outbox = node.answers.outbox, []
            for peer, frame in answers:
                if self._world.strikes(self._world.rates.killed_at_send, "server crashed between answers"):
                    raise Crashed
                if peer in self.unread:
                    node.peer_lost(peer, self._clock())
                elif isinstance(peer, bytes) and peer:
                    self.deliver(peer, frame)
            if node.unfinished:
                node.go_on(self._clock())
        if self._world.strikes(self._world.rates.checkpoint, "checkpoint"):
            ledger = node.ledger
            if isinstance(ledger, RecordedLedger):
                ledger.checkpoint()

    def _sleep(self, node: Coordinator) -> None:
        deadline = node.next_deadline()
        if deadline is None:
            return
        when = max(deadline + self._behind, self._world.now) + 1e-6
        if self._tick_at < self._world.now or when < self._tick_at:
            self._tick_at = when
            self._world.at(when, lambda: self._tick(when))

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of the server that runs; None between two."""
        return self.node.ledger if self.node is not None else None
