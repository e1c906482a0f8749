"""Who may see the page, and who may ask the HTTP service. Pure.

The law:

- The page is at a loopback host only: what is not encrypted stays on the machine (others come by ``ssh -L``).
- Every request must name, as its Host, an address that the page is at: so a site whose name was pointed at this machine
  gets nothing. One that says where it comes from (Origin) must come from the page itself.
- Every request must bring the token: in the link that `serve` printed, in a cookie that the link is exchanged for (not readable
  by scripts, sent to no other site), or as ``Authorization: Bearer``. Compared in constant time.
- The page is shown (GET, HEAD), and nothing can be done through it. The service's actions are asked by POST alone.
- A page may load nothing but its own files, and be framed by nobody.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from transferqueue.errors import UsageError
from transferqueue.transport import TcpAddress, parse_address
from transferqueue.transport.zeromq import is_loopback

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


SHOWING: Final = ("GET", "HEAD")
"""Methods that change nothing."""


class Refusal(NamedTuple):
    """What a request gets instead of an answer."""

    status: HTTPStatus
    why: str


def web_place(text: str) -> TcpAddress:
    """Where the page is to be: ``PORT`` or ``HOST:PORT``, of a loopback host; else `UsageError`."""
    where = text if ":" in text else f"127.0.0.1:{text}"
    place = parse_address(f"tcp://{where}")
    if not isinstance(place, TcpAddress) or place.host == "*" or not is_loopback(place.host):
        raise UsageError(
            f"web address {text!r} can be reached from other machines, and the page is not encrypted; give 127.0.0.1:PORT, "
            "and come from elsewhere through ssh -L PORT:127.0.0.1:PORT"
        )
    return place


class Door:
    """Lets in whoever brings `token` to a page at `place`."""

    def __init__(self, place: TcpAddress, token: str) -> None:
        self._token = token.encode()
        self._hosts = {f"{host}:{place.port}" for host in (place.host, "127.0.0.1", "localhost", "[::1]")}
        self.cookie: Final = f"transferqueue_{place.port}"
        """Named by the port: browsers keep one jar for all ports of a host."""

    def refuses(
        self,
        method: str,
        headers: Mapping[str, str],
        cookies: Mapping[str, str],
        asked: str | None,
        methods: Sequence[str] = SHOWING,
    ) -> Refusal | None:
        """Why a request is not answered; None: it is. asked: the token in its link, if any. methods: those that fit."""
        if headers.get("host", "") not in self._hosts:
            return Refusal(HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {', '.join(sorted(self._hosts))} only")
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return Refusal(HTTPStatus.FORBIDDEN, "another site may not ask this page")
        if method not in methods:
            why = "this page only shows" if "GET" in methods else "an action is asked by POST"
            return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, why)
        shown = asked or headers.get("authorization", "").removeprefix("Bearer ") or cookies.get(self.cookie, "")
        if not hmac.compare_digest(shown.encode(), self._token):
            return Refusal(
                HTTPStatus.UNAUTHORIZED,
                "open the link that serve printed; it holds the token, which programs send as Authorization: Bearer TOKEN",
            )
        return None
