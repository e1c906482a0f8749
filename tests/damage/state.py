"""Damages of state directories: ``python -m tests.damage state``.

A base is a state directory as a server left it that was killed, or that ended in order, with what its files were
earlier. A damage changes one file of it: a bit, its length, or all of it for what it was earlier. Then the next server
begins there. It must find exactly what was answered, or say which blocks are damaged (their rows are lost, and told),
or refuse with `Corruption` and change no file.
"""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np

from tests.server.lives import BIG, Life, write
from transferqueue.errors import Corruption
from transferqueue.ledger.persistence import image
from transferqueue.policies import Complete, Manual, Task
from transferqueue.schema import Field
from transferqueue.server.durability import state_directory as durable
from transferqueue.server.durability.journal_head import MARGIN_BYTES
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.durability_level import Level
from transferqueue.server.runtime_directory import SHARED_MEMORY
from transferqueue.storage.memory.checksum import checksum
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer

ARENA_BYTES = 128 << 10
KINDS = ("bit", "bit", "bit", "removed", "cut", "empty", "doubled", "older", "turn")
"""turn: one turn of the journal is deleted, by SQLite itself, which then knows of no damage."""


@dataclass
class Base:
    """A state directory and what it is to hold. files, earlier: contents by name; None: a file that was not there."""

    name: str
    level: Level
    root: Path
    in_state: bool
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    earlier: list[dict[str, bytes]] = field(default_factory=list)
    image: bytes = b""
    blocks: dict[int, bytes] = field(default_factory=dict)
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.root / "state"

    def open(self) -> StateDirectory:
        with patch.object(durable, "arena_root", self._root):
            return StateDirectory(self.state, self.level, first_epoch=100, shared=self.root / "shm")

    def _root(self, shared):
        return None if self.in_state else ROOT_OF(shared)

    def read(self) -> dict[str, bytes]:
        """What all files are now."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if not path.is_symlink() and path.is_file()
        }

    def reset(self) -> None:
        """Make the files what they were."""
        there = self.read()
        for name in there.keys() - self.files.keys():
            (self.root / name).unlink()
        for name, data in self.files.items():
            if there.get(name) != data:
                path = self.root / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod(0o600)
        for name, target in self.links.items():
            (self.root / name).unlink(missing_ok=True)
            (self.root / name).symlink_to(target)

    def names(self) -> list[str]:
        """What can be damaged."""
        return sorted([*self.files, *self.links])


ROOT_OF = durable.arena_root


@dataclass(frozen=True)
class Damage:
    """kind: see `KINDS`. where: a fraction of the file. at: which of the earlier files."""

    file: str
    kind: str
    where: float
    at: int


def damage(base: Base, one: Damage) -> bool:
    """Do it; whether anything changed."""
    path = base.root / one.file
    if one.file in base.links:
        if one.kind not in ("removed", "older"):
            return False
        path.unlink()
        if one.kind == "older":
            path.symlink_to(str(base.root / "elsewhere"))
        return True
    if one.kind == "turn":
        return one.file == "state/journal.sqlite" and _without_turn(path, one.at)
    before = base.files[one.file]
    data = _damaged(base, one, before)
    if data == before:
        return False
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    return True


def _without_turn(path: Path, at: int) -> bool:
    with closing(sqlite3.connect(path)) as database, database:
        turns = [turn for (turn,) in database.execute("SELECT turn FROM tail")]
        if turns:
            database.execute("DELETE FROM tail WHERE turn = ?", (turns[at % len(turns)],))
    return bool(turns)


def _damaged(base: Base, one: Damage, data: bytes) -> bytes | None:
    match one.kind:
        case "bit" if data:
            bit = int(_spot(base, one) * len(data) * 8)
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)
        case "removed":
            return None
        case "cut":
            return data[: int(one.where * len(data))]
        case "empty":
            return b""
        case "doubled":
            return data * 2
        case "older":
            return base.earlier[one.at % len(base.earlier)].get(one.file)
    return data


def _spot(base: Base, one: Damage) -> float:
    """Bits of memory that is no file are trusted (docs/decisions/durability.md): of that arena only the last page is
    damaged. Of another every other bit is one of a block: most of an arena is empty."""
    if base.in_state and "arena-" in one.file and one.at % 2:
        offset, nbytes = base.places[one.at // 2 % len(base.places)]
        return (offset + one.where * nbytes) / (ARENA_BYTES + MARGIN_BYTES)
    if base.level is Level.PROCESS and not base.in_state and "arena-" in one.file:
        size = ARENA_BYTES + MARGIN_BYTES
        return (ARENA_BYTES + one.where * MARGIN_BYTES) / size
    return one.where


def verdict(base: Base, one: Damage) -> str:
    """Damage, start, compare; what came of it. `AssertionError` for what must not be. The files are whole again
    afterwards."""
    try:
        if not damage(base, one):
            return "no damage"
        before = _lasting(base.read())
        try:
            life = base.open()
        except Corruption as error:
            return _refused(base, before, str(error))
        try:
            found = _compared(base, life)
            life.checkpoint()
        finally:
            life.close()
        base.open().close()  # nothing is left that would end a later life
        return found
    finally:
        base.reset()


def _refused(base: Base, before: dict[str, bytes], told: str) -> str:
    assert _lasting(base.read()) == before, "files were changed before they were refused"
    assert str(base.root) in told, f"nothing is named: {told}"
    assert "--accept-loss" in told, f"no remedy: {told}"
    return "refused"


def _compared(base: Base, life: StateDirectory) -> str:
    assert image.write(life.ledger.state, 0) == base.image, "the state is another one"
    damaged = life.damaged()
    for number, data in base.blocks.items():
        assert number in damaged or _bytes_of(life, number) == data, (
            f"block {number} has other bytes, and nobody says so"
        )
    if damaged:
        rows = life.ledger.blocks_lost(damaged, life.ledger.state.now)
        assert rows or not _rows_of(life, damaged), "no row is named"
    return "rows lost" if damaged else "as answered"


def _rows_of(life: StateDirectory, blocks: list[int]) -> bool:
    """Whether a row that is live would miss a block."""
    return any(table.rows_dropped.get("lost") for table in life.ledger.state.tables.values())


def _bytes_of(life: StateDirectory, block: int) -> bytes:
    at = life.ledger.state.core.blocks.blocks[block].at
    with life.arena.arena.view(at.offset, at.nbytes) as view:
        return bytes(view)


def _lasting(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without locks, and the index of the log, which SQLite makes anew from the rest."""
    return {name: data for name, data in files.items() if not name.endswith(("-shm", "lock"))}


# ---------------------------------------------------------------- bases


def bases(root: Path) -> list[Base]:
    """State directories with all that a ledger has, for each level, of a server that was killed and of one that
    ended."""
    made = []
    for level, in_state in ((Level.PROCESS, False), (Level.PROCESS, True), (Level.DISK, True)):
        for ended in (False, True):
            where = ", arena in the state" if in_state and level is Level.PROCESS else ""
            name = f"{level}{where}{', ended' if ended else ''}"
            made.append(_base(Base(name, level, root / str(len(made)), in_state), ended=ended))
    return made


def _base(base: Base, *, ended: bool) -> Base:
    (base.root / "shm").mkdir(parents=True)
    with patch.object(durable, "arena_root", base._root):
        life = Life(base.state, base.level, base.root / "shm", arena_bytes=ARENA_BYTES)
        base.earlier.append(base.read())
        for step in _story(life):
            if step == "image":
                life.state.checkpoint()
            base.earlier.append(base.read())
        if ended:
            life.state.checkpoint()
            base.earlier.append(base.read())
        else:
            base.files = base.read()
        life.state.commit()
        state = life.state.ledger.state
        base.blocks = {number: _bytes_of(life.state, number) for number in state.core.blocks.blocks}
        base.places = [(block.at.offset, block.at.nbytes) for block in state.core.blocks.blocks.values()]
        told = _told(life)
        life.crash()
    if ended:
        base.files = base.read()
    base.files = {name: data for name, data in base.files.items() if not name.endswith("lock")}
    base.links = {"state/arena": str((base.state / "arena").readlink())}
    base.reset()
    after = base.open()
    base.image = image.write(after.ledger.state, 0)
    after.close()
    base.reset()
    with patch.object(durable, "arena_root", base._root):
        life = Life(base.state, base.level, base.root / "shm")
        again = _told(life)
        assert again == told, f"the base itself is not what was answered: {told} {again}"
        life.crash()
    base.reset()
    assert base.earlier.pop() is not None
    return base


def _told(life: Life) -> list[object]:
    """What a new client is answered about every row."""
    life.clients += 100
    client = life.client()
    rows = np.arange(6).tobytes()
    read = [
        client.ask(m.ReadRequest("t", rows, ["x"])),
        client.ask(m.ReadRequest("big", rows, ["x"])),
        client.ask(m.ReadRequest("big", rows[:16], ["r"])),
    ]
    audit = codec.decode_observed(client.ask(m.Observe("audit")), AuditAnswer)
    return [
        audit.tables,
        *(re.sub(rb"(?s)\xc4\x10.{16}", b"a ticket", codec.encode_answer(m.AnswerFrame(0, 0, one))) for one in read),
    ]


def _story(life: Life) -> Iterator[str]:
    """A few turns of everything; yields where an older file may come from."""
    client = life.client()

    def ask(request: m.Request) -> m.Reply:
        reply = client.ask(request)
        assert not isinstance(reply, m.Failed), reply
        return reply

    client.create_table(retention=Manual())
    ask(client.put(6))
    yield "turn"
    tasks = [Task("reward", ["x"], ["r"]), Task("train", ["x", "r"], groups=Complete())]
    ask(m.CreateTable("big", tasks=tasks, fields=[BIG]))
    for fill in range(4):
        facts = m.RowFacts(group_id=np.full(2, fill // 2).tobytes(), group_size=np.full(2, 4, np.int32).tobytes())
        assert isinstance(write(life, client, 2, fill, "big", facts), m.PutRows)
    leased = ask(m.LeaseRequest("t", "train", rows=2))
    yield "image"
    ask(m.Ack("t", leased.lease, leased.token))
    ask(m.LeaseRequest("t", "train", rows=2))
    yield "turn"
    granted = ask(m.Grant(4096))
    weight = Field("w", "float32", (4,))
    ask(
        m.Publish(
            "policy",
            3,
            [weight],
            [m.WrittenBlock(granted.extent, granted.offset, 64, 1, ["w"], [0], checksum=checksum(bytes(64)))],
        )
    )
    rewards = m.Columns(fields=[Field("r", "float64")], inline=[m.Inline("r", np.array([1237.57, 0.5]).tobytes())])
    held = ask(m.LeaseRequest("big", "reward", rows=2))
    ask(m.Ack("big", held.lease, held.token, columns=rewards))
    yield "turn"
    ask(m.Drop("t", np.array([5]).tobytes(), "unwanted"))
    ask(client.put(3))
    yield "turn"
    ask(client.put(3))


# ---------------------------------------------------------------- many


def some(base: Base, dice: random.Random) -> Damage:
    """A damage of chance."""
    return Damage(dice.choice(base.names()), dice.choice(KINDS), dice.random(), dice.randrange(99))


def run(count: int, seed: int) -> int:
    """`count` damages from `seed` on; how many went wrong."""
    dice, found, wrong, began = random.Random(seed), Counter(), 0, time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="tq-damage-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    try:
        made = bases(root)
        while found.total() - found["no damage"] + wrong < count:
            base = dice.choice(made)
            one = some(base, dice)
            try:
                found[verdict(base, one)] += 1
            except Exception as error:  # noqa: BLE001  (any other error is what is looked for)
                wrong += 1
                print(f"WRONG: {base.name}: {one}: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(root)
    told = ", ".join(f"{number:,} {what}" for what, number in sorted(found.items()) if what != "no damage")
    print(
        f"seed {seed}: {count:,} damages of state directories in {time.monotonic() - began:.0f} s: {told}, {wrong} "
        "wrong"
    )
    return wrong
