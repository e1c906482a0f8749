"""Who may see the page, and who may ask the HTTP service. Pure.

The law:

- The page is at a loopback host only: what is not encrypted stays on the machine (others come by ``ssh -L``).
- Every request must name, as its Host, an address that the page is at: so a site whose name was pointed at this machine
  gets nothing. One that says where it comes from (Origin) must come from the page itself.
- Every request must bring a token: in the link that `serve` printed, in a cookie that the link is exchanged for (not readable
  by scripts, sent to no other site), or as ``Authorization: Bearer``. Compared in constant time.
- There are three tokens. That of the page opens the page, and that of the service the service, each at its own port only. That of the
  metrics opens `/metrics` at both, and nothing else, so that a Prometheus holds no token that opens more.
- The link leads to ``/`` only, and its token is exchanged there only: so no address that somebody else wrote is followed.
- The door looks at a request before anything else does. What is not let in is not parsed, and reaches no route.
- A page may load nothing but its own files, and be framed by nobody.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from transferqueue.errors import UsageError
from transferqueue.transport import TcpAddress, parse_address
from transferqueue.transport.control.zeromq import is_loopback

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

METRICS: Final = "/metrics"
LINK: Final = "/"
"""Where the link leads, and its token is exchanged for a cookie."""


class AccessDenied(NamedTuple):
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


class AccessPolicy:
    """Lets in whoever brings `token` to a page at `place`, and to its metrics whoever brings `metrics_token`."""

    def __init__(self, place: TcpAddress, token: str, metrics_token: str) -> None:
        self._token, self._metrics_token = token.encode(), metrics_token.encode()
        self._hosts = {f"{host}:{place.port}" for host in (place.host, "127.0.0.1", "localhost", "[::1]")}
        self.cookie: Final = f"transferqueue_{place.port}"
        """Named by the port: browsers keep one jar for all ports of a host."""

    def refuses(
        self, path: str, headers: Mapping[str, str], cookies: Mapping[str, str], asked: str | None = None
    ) -> AccessDenied | None:
        """Why a request is not answered; None: it is. asked: the token in its link, if any."""
        if headers.get("host", "") not in self._hosts:
            return AccessDenied(
                HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {', '.join(sorted(self._hosts))} only"
            )
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return AccessDenied(HTTPStatus.FORBIDDEN, "another site may not ask this page")
        shown = asked or headers.get("authorization", "").removeprefix("Bearer ") or cookies.get(self.cookie, "")
        opens = hmac.compare_digest(shown.encode(), self._token)
        opens_metrics = hmac.compare_digest(shown.encode(), self._metrics_token)
        if opens or (opens_metrics and path == METRICS):
            return None
        if opens_metrics:
            return AccessDenied(
                HTTPStatus.FORBIDDEN, f"this token opens {METRICS} and nothing else; open the link that serve printed"
            )
        return AccessDenied(
            HTTPStatus.UNAUTHORIZED,
            "open the link that serve printed; it holds the token, which programs send as Authorization: Bearer TOKEN",
        )
