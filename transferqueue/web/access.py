"""Access to the page and to the HTTP service. Does no I/O.

- The page listens at a loopback host only: unencrypted data stays on the machine (use ``ssh -L`` from elsewhere).
- Every request must name, as its Host, an address at which the page listens. So a site whose name resolves to this
  machine gets nothing. A request with an Origin must come from the page itself.
- Every request must bring a token: in the link that was printed, in the cookie that replaces the link (not readable
  by scripts, sent to no other site), or as ``Authorization: Bearer``. Tokens are compared in constant time.
- Of the three tokens, that of the page opens the page and that of the service the service, each at its own port only.
  The token of the metrics opens `/metrics` at both and nothing else, which suffices for a Prometheus.
- The link leads to ``/`` only, and its token is exchanged there only, so the redirect never follows an address from the
  request.
- `AccessPolicy` sees a request before any other code does. A refused request is not parsed and reaches no route.
- A page may load only its own files, and no other page may frame it.
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
"""The path of the link, where its token is exchanged for a cookie."""


class AccessDenied(NamedTuple):
    """The answer to a refused request."""

    status: HTTPStatus
    why: str


def web_place(text: str) -> TcpAddress:
    """Parse the address of the page, ``PORT`` or ``HOST:PORT``. `UsageError` unless the host is a loopback host."""
    where = text if ":" in text else f"127.0.0.1:{text}"
    place = parse_address(f"tcp://{where}")
    if not isinstance(place, TcpAddress) or place.host == "*" or not is_loopback(place.host):
        raise UsageError(
            f"web address {text!r} can be reached from other machines, and the page is not encrypted; give "
            "127.0.0.1:PORT, and come from elsewhere through ssh -L PORT:127.0.0.1:PORT"
        )
    return place


class AccessPolicy:
    """Admits requests with `token` to a page at `place`, and requests with `metrics_token` to its metrics."""

    def __init__(self, place: TcpAddress, token: str, metrics_token: str) -> None:
        self._token, self._metrics_token = token.encode(), metrics_token.encode()
        self._hosts = {f"{host}:{place.port}" for host in (place.host, "127.0.0.1", "localhost", "[::1]")}
        self.cookie: Final = f"transferqueue_{place.port}"
        """The name of the cookie contains the port, because browsers share cookies between all ports of a host."""

    def refuses(
        self, path: str, headers: Mapping[str, str], cookies: Mapping[str, str], link_token: str | None = None
    ) -> AccessDenied | None:
        """The refusal of a request; None admits it. link_token: the token in its link, or None."""
        if headers.get("host", "") not in self._hosts:
            return AccessDenied(
                HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {', '.join(sorted(self._hosts))} only"
            )
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return AccessDenied(HTTPStatus.FORBIDDEN, "another site may not ask this page")
        shown = link_token or headers.get("authorization", "").removeprefix("Bearer ") or cookies.get(self.cookie, "")
        opens = hmac.compare_digest(shown.encode(), self._token)
        opens_metrics = hmac.compare_digest(shown.encode(), self._metrics_token)
        if opens or (opens_metrics and path == METRICS):
            return None
        if opens_metrics:
            return AccessDenied(
                HTTPStatus.FORBIDDEN, f"this token opens {METRICS} and nothing else; open the link that was printed"
            )
        return AccessDenied(
            HTTPStatus.UNAUTHORIZED,
            "open the link that was printed; it holds the token, which programs send as Authorization: Bearer TOKEN",
        )
