"""``python -m tests.server.recorded`` records a small state directory and a small snapshot of this version anew.

What they hold is made by `fill`, and `told` is what a server that goes on from them says of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import transferqueue as tq
from transferqueue.server.durability.journal import FORMAT as JOURNAL_FORMAT
from transferqueue.server.durability.snapshot_directory import FORMAT as SNAPSHOT_FORMAT

HERE: Final = Path(__file__).parent / "golden"
STATE: Final = HERE / f"state-{JOURNAL_FORMAT}.tar.xz"
SNAPSHOT: Final = HERE / f"snapshot-{SNAPSHOT_FORMAT}.tar.xz"
REMEDY: Final = (
    "a server of this version does not go on from files that the last recorded version wrote. If that is meant: raise "
    "FORMAT in transferqueue/server/durability/journal.py (or snapshot_directory.py beside it), unless no release has "
    "written such files, say so in docs/operate/compatibility.md, and run python -m tests.server.recorded"
)


class NotServed(Exception):
    """The server refused to start; what it said."""


@contextmanager
def serving(directory: Path, state: Path | None, snapshots: Path | None = None) -> Iterator[tq.Queue]:
    """A queue of a server process, of durability disk if it has a state directory."""
    durable = ["--durability", "disk", "--state", str(state)] if state else []
    directory.mkdir(mode=0o700)
    environment = {**os.environ, "TRANSFERQUEUE_SNAPSHOTS": str(snapshots or directory)}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "transferqueue.server", "--address", f"ipc://{directory}/q.sock"),
            *("--arena-bytes", "4MiB", *durable),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise NotServed(process.stderr.read())
        with tq.connect(f"ipc://{directory}/q.sock") as queue:
            yield queue
    finally:
        process.terminate()
        process.wait(20)
        for stream in (process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]


def fill(queue: tq.Queue) -> None:
    """A table with rows in several states, and a channel."""
    table = queue.create_table(
        "rollouts",
        tasks=[tq.Task("reward", needs=["ids"], gives=["reward"]), tq.Task("train", needs=["ids", "reward"])],
    )
    table.put(ids=[[1, 2, 3], [4], []], note=["a", "ü", ""], key=["k1", "k2", "k3"])
    with table.lease("reward", rows=2) as batch:
        batch.ack(reward=[0.5, 1237.57])
    with table.lease("train", rows=1) as batch:
        batch.ack()
    table.drop([2], reason="bad")


def told(queue: tq.Queue) -> Any:
    """What a server says of what `fill` made."""
    table = queue.table("rollouts")
    rows = table.read(fields=["ids", "note"])
    audit = queue.audit()
    counts = audit.tables["rollouts"]
    return {
        "ids": [list(map(int, one)) for one in rows["ids"].list()],
        "note": rows["note"].list(),
        "balanced": audit.balanced,
        "rows": {name: getattr(counts, name) for name in ("rows_put", "rows_live", "rows_done", "dropped")},
    }


def pack(directory: Path, into: Path) -> None:
    """The files of a directory, links left out, with nothing that tells who packed them."""
    with tarfile.open(into, "w:xz") as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.is_symlink():
                entry = archive.gettarinfo(path, str(path.relative_to(directory)))
                entry.uid = entry.gid = entry.mtime = 0
                entry.uname = entry.gname = ""
                with path.open("rb") as file:
                    archive.addfile(entry, file)


def unpack(archive: Path, into: Path) -> Path:
    """The directory as it was; of a state directory the link to its arena too."""
    into.mkdir(mode=0o700)
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    for arena in into.glob("arena-*"):
        (into / "arena").symlink_to(arena)
    return into


def main() -> None:
    """Write both files."""
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as found:
        directory = Path(found)
        state = directory / "state"
        with serving(directory / "run", state, directory / "snapshots") as queue:
            fill(queue)
            queue.snapshot("kept")
        pack(state, STATE)
        pack(directory / "snapshots", SNAPSHOT)
        shutil.rmtree(state)


if __name__ == "__main__":
    main()
