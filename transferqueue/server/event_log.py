"""One log line for each event in a server's life: it listens, a session opens or ends, a table comes or goes, a lease
is lost.

Lines have level INFO and the logger ``transferqueue.server``: ``session_opened session=7 label=reward-0 pid=4711``.
A handler reads the record's attributes ``event`` (the name) and ``values``.
"""

from __future__ import annotations

import logging
from typing import Final

from transferqueue.errors.text import visible
from transferqueue.wire import messages as m

_log: Final = logging.getLogger("transferqueue.server")
TABLE_EVENTS: Final = {m.CreateTable: "table_created", m.DropTable: "table_dropped", m.Seal: "table_sealed"}


def log_event(event: str, **values: str | int) -> None:
    """Log one event. Texts may come from other processes, so unprintable characters are escaped. If INFO is off, a call
    only compares the level."""
    if _log.isEnabledFor(logging.INFO):
        shown = {name: visible(value) if isinstance(value, str) else value for name, value in values.items()}
        text = " ".join([event, *(f"{name}={_quoted(value)}" for name, value in shown.items())])
        _log.info("%s", text, extra={"event": event, "values": shown})


def log_table_event(request: m.Request, session: int) -> None:
    """Log that a request made, dropped or sealed a table. Other requests are not logged."""
    event = TABLE_EVENTS.get(type(request))
    if event is not None:
        log_event(event, table=getattr(request, "name", "") or getattr(request, "table", ""), session=session)


def _quoted(value: str | int) -> str:
    text = str(value)
    return f'"{text}"' if not text or " " in text else text
