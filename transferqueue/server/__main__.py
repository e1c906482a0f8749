"""``python -m transferqueue.server``: serve until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import sys

from transferqueue.errors import TransferQueueError, UsageError
from transferqueue.limits import parse_bytes
from transferqueue.server.serving import serve


def main(arguments: list[str] | None = None) -> int:
    """Parse `arguments`, serve, and return the exit code: 0 when told to stop, 2 for a wrong call, else 1."""
    options = _parser().parse_args(arguments)
    try:
        serve(
            options.address,
            tcp=options.tcp,
            arena_bytes=parse_bytes(options.arena_bytes) if options.arena_bytes else None,
            on_ready=lambda addresses: print("ready", *addresses, flush=True),  # noqa: T201
        )
    except TransferQueueError as error:
        sys.stderr.write(f"transferqueue.server: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m transferqueue.server", description=__doc__)
    parser.add_argument("--address", help="ipc:///directory/name.sock or tcp://host:port; default: the user's own")
    parser.add_argument("--tcp", action="append", default=[], metavar="HOST:PORT", help="listen here too")
    parser.add_argument("--arena-bytes", metavar="SIZE", help="ceiling of the memory for rows, such as 8GiB")
    return parser


if __name__ == "__main__":
    sys.exit(main())
