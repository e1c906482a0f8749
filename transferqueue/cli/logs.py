"""Log lines of a command: to stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from transferqueue.errors.text import visible_lines

LEVELS: Final = ("debug", "info", "warning", "error")
LOGS: Final = "Logs"
LogLevelOption = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        show_default=False,
        rich_help_panel=LOGS,
        help=(
            "Log to stderr from this level on: debug, info (a line for each event), warning, error. "
            "Default: warnings, without times."
        ),
    ),
]
LogJsonOption = Annotated[
    bool,
    typer.Option(
        "--log-json",
        rich_help_panel=LOGS,
        help="Log one JSON object a line: time, level, logger, text, and an event's values.",
    ),
]


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        if event := getattr(record, "event", None):
            entry |= {"event": event, **getattr(record, "values", {})}
        return json.dumps(entry)


class TextLines(logging.Formatter):
    """``2026-01-02T03:04:05Z INFO transferqueue.server: session_opened …``, unprintable characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of a traceback."""
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return visible_lines(f"{at} {record.levelname} {record.name}: {super().format(record)}")


def log_to_stderr(level: str | None, *, as_json: bool) -> None:
    """Send the logs of ``transferqueue`` to stderr. Does nothing without both. `UsageError` for an unknown level."""
    from transferqueue.errors import UsageError

    if level is None and not as_json:
        return
    if level is not None and level.lower() not in LEVELS:
        raise UsageError(f"--log-level {level} is none; there are {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logger = logging.getLogger("transferqueue")
    logger.handlers[:] = [handler]
    logger.setLevel((level or "info").upper())
    logger.propagate = False
