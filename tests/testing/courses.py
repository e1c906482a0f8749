"""``python -m tests.testing.courses`` records the courses of simulated seeds anew. The commit that does so says which
change was meant to change them.

The course of a seed is one digest: each frame that the server receives and sends, when and from whom; the journal that
is left; the faults; and the state of the source of chance at the end. Left out is what changes no behaviour: the texts
of errors, and empty fields at the end of a message, so that a new field with an empty default leaves all courses as
they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.simulator.run import SimRun

FILE: Final = Path(__file__).parent / "golden" / "courses.json"
SEEDS: Final = 200
REMEDY: Final = (
    "the course of these seeds changed. If a rule of the queue changed unmeant, mend it; if a job of the simulator or "
    "a rule changed on purpose, run python -m tests.testing.courses, and say in the commit what changed the courses"
)


def recorded() -> dict[int, str]:
    """Digests by seed, as the file has them."""
    return {int(seed): digest for seed, digest in json.loads(FILE.read_text()).items()}


def course(seed: int) -> str:
    """Run a seed; the digest of its course."""
    run, digest = SimRun(seed), blake2b(digest_size=8)

    def write(*values: object) -> None:
        digest.update(repr(values).encode())

    def written(way: str, carry: Callable[[bytes, bytes], None]) -> Callable[[bytes, bytes], None]:
        def act(peer: bytes, frame: bytes) -> None:
            write(way, run.world.now, peer, _essence(frame))
            carry(peer, frame)

        return act

    run.server.receive = written("received", run.server.receive)
    run.server.deliver = written("sent", run.server.deliver)
    run.whole()
    write([[_essence(record) for record in records] for records, _ in run.server.disk.commits])
    write(run.world.now, sorted(run.world.faults.items()), run.rows_put, run.world.random.getstate())
    return digest.hexdigest()


def _essence(data: bytes) -> Any:
    """The values in a frame or record, without the texts of errors and without empty fields at the end of each list."""
    return _without_ends(msgspec.msgpack.decode(data))


def _without_ends(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    values = [_without_ends(each) for each in value]
    if values and values[0] == "Failed":
        return values[:2]
    while values and not values[-1]:
        values.pop()
    return values


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps({seed: course(seed) for seed in range(SEEDS)}, indent=0) + "\n")


if __name__ == "__main__":
    main()
