"""``python -m transferqueue.server``: serve until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transferqueue.limits import parse_bytes
from transferqueue.server.durability_level import Level
from transferqueue.server.process.serve import serve
from transferqueue.server.process.supervisor import exit_code, supervise


def main(arguments: list[str] | None = None) -> int:
    """Parse `arguments`, serve, and return the exit code: 0 when a signal stopped the server, 2 for wrong arguments;
    see `supervisor`."""
    options = _parser().parse_args(arguments)

    def run() -> None:
        serve(
            options.address,
            tcp=options.tcp,
            arena_bytes=parse_bytes(options.arena_bytes) if options.arena_bytes else None,
            keys=options.keys,
            plain_bytes=options.plain_bytes,
            carrier=options.bytes,
            durability=options.durability,
            state=options.state,
            accept_loss=options.accept_loss,
            coordinator=options.coordinator,
            spill_dir=options.spill_dir,
            spill_bytes=parse_bytes(options.spill_bytes) if options.spill_bytes else None,
            on_ready=lambda addresses: print("ready", *addresses, flush=True),  # noqa: T201
        )

    return supervise(run) if options.supervise else exit_code(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transferqueue.server", description=__doc__)
    parser.add_argument("--address", help="ipc:///directory/name.sock or tcp://host:port; default: the user's own")
    parser.add_argument("--tcp", action="append", default=[], metavar="HOST:PORT", help="listen here too")
    parser.add_argument("--arena-bytes", metavar="SIZE", help="ceiling of the memory for rows, such as 8GiB")
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="keys that tcp asks for; default: the user's, where needed"
    )
    parser.add_argument(
        "--plain-bytes",
        action="store_true",
        help="send columns to other machines unencrypted, by ticket, with keys too",
    )
    parser.add_argument(
        "--bytes", metavar="CARRIER", help="what else columns may leave by: stream (nothing), nixl (RDMA)"
    )
    parser.add_argument("--durability", choices=list(Level), default=Level.MEMORY, help="what outlives this process")
    parser.add_argument("--state", type=Path, metavar="DIR", help="directory that keeps it, for process and disk")
    parser.add_argument(
        "--accept-loss", action="store_true", help="begin anew where that cannot be read whole; its files stay"
    )
    parser.add_argument("--coordinator", metavar="K/N", help="this is number K of N, used as one: 1/2, or NAME:1/2")
    parser.add_argument("--spill-dir", type=Path, metavar="DIR", help="where cold rows go when the memory fills")
    parser.add_argument("--spill-bytes", metavar="SIZE", help="the most bytes there, such as 200GiB")
    parser.add_argument("--supervise", action="store_true", help="start the server again when it crashes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
