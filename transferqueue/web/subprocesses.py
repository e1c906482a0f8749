"""The processes of the page and of the HTTP service as `serve` has them: started when the server listens, ended by the end of the
server's process."""

from __future__ import annotations

import select
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Final, Literal

from transferqueue.errors import UsageError
from transferqueue.web.token import new_token

Kind = Literal["page", "service"]
KINDS: Final[dict[str, Kind]] = {"web": "page", "http": "service"}
"""What each option of `serve` starts."""
START_S: Final = 30.0
"""It loads its libraries in half a second."""


def check_installed() -> None:
    """`UsageError` where the page's libraries are missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--web and --http need {' and '.join(missing)}, not installed here: pip install 'asyncflow-transferqueue[web]'"
        )


def start_page(
    address: str, where: str, token: str, kind: Kind = "page", *, metrics_token: str | None = None
) -> tuple[subprocess.Popen[str], str]:
    """The page (or HTTP service) of the server at `address`, and the link to it, which holds the token: a password.

    metrics_token: opens `/metrics` alone (None: only `token` opens it).

    The process ends when this one does, however that comes about. `UsageError` if it cannot be there.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "transferqueue.web", kind, address, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C is the server's
    )
    if process.stdin is None or process.stdout is None:
        raise TypeError("a pipe was asked for")
    with suppress(BrokenPipeError):  # it has ended, and the next line says so
        process.stdin.write(f"{token} {metrics_token or new_token()}\n")
        process.stdin.flush()
    told, _, _ = select.select([process.stdout], [], [], START_S)
    url = process.stdout.readline().strip() if told else ""
    if not url:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()
        why = "it said why above" if told else f"it did not listen within {START_S:g} s"
        raise UsageError(f"the {kind} at {where} could not be started; {why}")
    return process, f"{url}?token={token}"
