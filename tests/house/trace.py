"""The files and functions of the package that one put and one lease pass through, client and server together.

The server is embedded, so all threads of both are in this process, and each is traced from its start
(`threading.setprofile`). Two clients join by its address: then bytes go through shared memory, as between processes.
Puts and leases are made until nothing is new (fields are known, memory is mapped, caches are warm); then `REPEATS` of
each are traced, back to back. What an operation passes through is what more than half of them did: work that follows an
answer counts for the next operation, and what timers do by chance (heartbeats, renewals) does not count. Functions are
those that are called by name, with methods, lambdas and generators, without comprehensions.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

REPEATS: Final = 25
WARM: Final = 40
ROWS: Final = 8
INLINE: Final = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"})
"""Code that has no name of its own. Python 3.12 and later run comprehensions inside the function around them."""

_called: set[CodeType] = set()


def trace() -> dict[str, list[str]]:
    """Operation -> functions, as ``transferqueue/client/table.py:Table.put``."""
    threading.setprofile(_note)
    sys.setprofile(_note)
    try:
        return _operations()
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call":
        _called.add(frame.f_code)


def _operations() -> dict[str, list[str]]:
    import numpy as np

    import transferqueue as tq

    root = Path(tq.__file__).resolve().parent
    ids = [np.arange(n, dtype=np.int32) for n in range(1, ROWS + 1)]
    with _queues(tq) as (producer, consumer):
        fields = [tq.Field("response_ids", "int32", (None,)), tq.Field("rewards", "float32")]
        table = producer.create_table(
            "rollouts", fields=fields, tasks=[tq.Task("train", needs=["response_ids", "rewards"])]
        )
        rewards = np.zeros(ROWS, np.float32)
        remote, held = consumer.table("rollouts"), []

        def put() -> None:
            table.put(response_ids=ids, rewards=rewards, policy_version=1)

        def lease() -> None:
            held.append(remote.lease("train", rows=ROWS))

        for _ in range(WARM):
            put()
            lease()
            held.pop().ack()
        found = {"put": _passed(put, root)}
        for _ in range(REPEATS):
            lease()
            held.pop().ack()
        for _ in range(2 * REPEATS):
            put()
        for _ in range(REPEATS):
            lease()
        found["lease"] = _passed(lease, root)
        for batch in held:
            batch.ack()
    return found


@contextmanager
def _queues(tq: Any) -> Iterator[tuple[Any, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="tq-") as runtime,
        tq.connect(runtime=runtime) as server,
        tq.connect(server.address) as producer,
        tq.connect(server.address) as consumer,
    ):
        yield producer, consumer


def _passed(operation: Callable[[], None], root: Path) -> list[str]:
    counts: Counter[CodeType] = Counter()
    _called.clear()
    for _ in range(REPEATS):
        operation()
        called = _called.copy()
        _called.clear()
        counts.update(called)
    often = {code for code, count in counts.items() if count > REPEATS / 2 and code.co_name not in INLINE}
    return sorted({name for code in often if (name := _name(code, root))})


def _name(code: CodeType, root: Path) -> str:
    path = Path(code.co_filename).resolve()
    for known in (root, root.parent / "adapters", root.parent / "workflows"):
        if path.is_relative_to(known):
            return f"{path.relative_to(root.parent)}:{code.co_qualname}"
    return ""


def text(found: Mapping[str, list[str]], base: Mapping[str, Any] | None = None, *, verbose: bool = False) -> str:
    """Files and functions of each operation. verbose: by room and file, with the names."""
    lines = []
    for operation, functions in found.items():
        was = f"{_counts(base[operation])} → " if base else ""
        lines.append(f"{operation}: {was}{_counts(functions)}")
        rooms: dict[str, dict[str, list[str]]] = {}
        for function in functions:
            path, _, name = function.partition(":")
            parts = path.split("/")
            rooms.setdefault(parts[1] if len(parts) > 2 else ".", {}).setdefault(path, []).append(name)
        for room, files in sorted(rooms.items()):
            lines.append(f"  {room}: {len(files)} files, {sum(map(len, files.values()))} functions")
            if verbose:
                lines += [f"    {path}: {', '.join(names)}" for path, names in files.items()]
    return "\n".join(lines) + "\n"


def _counts(functions: list[str]) -> str:
    files = {function.partition(":")[0] for function in functions}
    return f"{len(files)} files, {len(functions)} functions"
