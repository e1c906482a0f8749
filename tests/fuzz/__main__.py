"""``python -m tests.fuzz``: a million mutated frames against the decoders, then garbage against a server that runs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import transferqueue as tq
from tests.client.deployments import served
from tests.fuzz import decoder, live
from transferqueue.limits import MIB

GROWN_MAX = 10 * MIB


def main() -> int:
    """Run and print; 1 if anything changed or grew. A frame that breaks a decoder is shown with its traceback."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--frames", type=int, default=1_000_000, help="for the decoders")
    options.add_argument("--live", type=int, default=40_000, help="for the server")
    options.add_argument("--connections", type=int, default=4_000, help="raw ones to the server")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    decoded = decoder.run(given.frames, given.seed)
    kept = sum(decoded.messages.values())
    print(f"seed {given.seed}: {decoded.frames:,} frames in {decoded.seconds:.1f} s: {decoded.refused:,} refused, {kept:,} "
          f"still a message, of {len(decoded.messages)} types; memory {decoded.grown_bytes / MIB:+.1f} MiB")  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,
        served(Path(directory) / "run") as server,
        tq.connect(server.ipc) as queue,
    ):
        found = fuzz_server(queue, server, given.live, given.connections, given.seed)
    same = "unchanged" if found.before == found.after else f"CHANGED: {found.before} -> {found.after}"
    print(f"server: {found.frames:,} frames and {found.connections:,} raw connections over ipc and tcp in {found.seconds:.1f} "
          f"s: state {same}; memory {found.grown_bytes / MIB:+.1f} MiB")  # fmt: skip
    return int(found.before != found.after or max(found.grown_bytes, decoded.grown_bytes) > GROWN_MAX)


def fuzz_server(queue, server, frames, connections, seed):
    """A table with rows in every state, then the garbage."""
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    table.put(x=[[1, 2], [3]], y=[1.0, 2.0])
    held = table.lease("train", rows=1, timeout_s=20)
    addresses = [server.ipc, server.tcp]
    found = live.run(queue, addresses, server.process.pid, frames=frames, connections=connections, seed=seed)
    held.ack()
    return found


if __name__ == "__main__":
    sys.exit(main())
