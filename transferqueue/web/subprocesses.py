"""Start the processes of the page and of the HTTP service for `serve`. They end with the server's process."""

from __future__ import annotations

import select
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Final, Literal

from transferqueue.errors import UsageError
from transferqueue.lazy import install_line
from transferqueue.web.token import new_token

Kind = Literal["page", "service"]
KINDS: Final[dict[str, Kind]] = {"web": "page", "http": "service"}
"""The process that each option of `serve` starts."""
START_S: Final = 30.0
"""The process loads its libraries in half a second; on a busy machine, in many seconds."""
CONNECT_S: Final = (len(KINDS) + 1) * START_S
"""The server answers a page once all pages have started."""


def check_installed(asks: str = "--web and --http") -> None:
    """`UsageError` if the libraries of the page are not installed. asks: what needs them."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{asks} need {' and '.join(missing)}, not installed here: {install_line('web')}")


def start_page(
    address: str, where: str, token: str, kind: Kind = "page", *, metrics_token: str | None = None
) -> tuple[subprocess.Popen[str], str]:
    """Start the page (or HTTP service) of the server at `address`. It ends with this process.

    Args:
        address: The server.
        where: HOST:PORT to listen at.
        token: Opens the page.
        kind: The page or the service. Default: "page".
        metrics_token: Opens `/metrics` alone. Default: None, only `token` opens it.

    Returns:
        The process, and the link, which contains the token: a password.

    Raises:
        UsageError: The page did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "transferqueue.web", kind, address, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C must reach the server only
    )
    if process.stdin is None or process.stdout is None:
        raise TypeError("a pipe was asked for")
    with suppress(BrokenPipeError):  # the process ended; the missing line below reports it
        process.stdin.write(f"{token} {metrics_token or new_token()}\n")
        process.stdin.flush()
    readable, _, _ = select.select([process.stdout], [], [], START_S)
    url = process.stdout.readline().strip() if readable else ""
    if not url:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()
        why = "its error is above" if readable else f"it did not listen within {START_S:g} s"
        raise UsageError(f"the {kind} at {where} could not be started; {why}")
    return process, f"{url}?token={token}"
