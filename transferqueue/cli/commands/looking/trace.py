"""`transferqueue trace`: send traces of rows to an OpenTelemetry collector."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from transferqueue.cli.connection import address_of
from transferqueue.cli.options import AddressArgument, AddressOption
from transferqueue.cli.running import ended_like_ctrl_c
from transferqueue.cli.screens.terminal import say

if TYPE_CHECKING:
    from transferqueue.observe.tracing.follower import RowFollower

EXAMPLES = (
    ("transferqueue trace", "one row in 64, to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names"),
    ("transferqueue trace tcp://trainer:7777 --every 1", "every row of another server"),
    ("transferqueue trace --every 1 --console", "print the spans, without a collector"),
)


def trace(
    where: AddressArgument = None,
    address: AddressOption = None,
    every: Annotated[
        int, typer.Option("--every", "-n", min=1, metavar="N", help="Follow one row in N, chosen by its id.")
    ] = 64,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.05, max=60.0, metavar="SECONDS", help="Time between two looks.")
    ] = 0.5,
    console: Annotated[bool, typer.Option("--console", help="Print spans as JSON instead of sending them.")] = False,
) -> None:
    """Send traces of rows to an OpenTelemetry collector.

    Runs until Ctrl-C or SIGTERM. A trace spans a row from its put to its end, and is sent when the row ends; rows put
    before the start have none. Each lease is a span, an error if its worker failed, died or was too late; requeues, new
    columns and checkpoints are events. The OTEL_ variables of the OpenTelemetry SDK set collector, headers, service
    name and sampler. Programs need no change, and `trace` asks the server once a look.
    """
    from transferqueue.cli.connection import connected
    from transferqueue.errors.text import counted
    from transferqueue.observe.tracing.follower import RowFollower
    from transferqueue.observe.tracing.otel import SpanExport, tracer_provider

    with connected(address_of(where or address), label="trace") as queue:
        provider = tracer_provider(console=console)
        follower = RowFollower(queue, SpanExport(provider.get_tracer("transferqueue")), every=every)
        try:
            follower.look()
            say(f"following 1 row in {every} of {queue.address}; Ctrl-C ends it", err=True)
            _look_until_stopped(follower, interval)
        finally:
            follower.close()
            provider.shutdown()
    skipped = f"; {counted(follower.skipped, 'row')} beyond the bound had none" if follower.skipped else ""
    say(f"{counted(follower.exported, 'trace')} sent{skipped}", err=True)


def _look_until_stopped(follower: RowFollower, interval_s: float) -> None:
    """Look again and again, and once more at the end. SIGTERM ends it as Ctrl-C does."""
    with ended_like_ctrl_c(signal.SIGTERM):
        try:
            while True:
                time.sleep(interval_s)
                follower.look()
        except KeyboardInterrupt:
            follower.look()
