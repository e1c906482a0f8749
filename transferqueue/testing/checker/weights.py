"""Weights: a pulled version was published, is whole, and is not older than one whose publication was confirmed
before."""

from __future__ import annotations

from collections import defaultdict

from transferqueue.testing.checker.base import Found, Judge, Operation, Violation
from transferqueue.testing.history import history as h


class WeightJudge(Judge):
    """Reports invented, torn and outdated weights."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int], list[tuple[str, Operation]]] = defaultdict(list)
        self._newest: dict[str, int] = {}
        self._newest_at: dict[int, int] = {}

    def invoked(self, op: Operation) -> Found:
        """See `Judge`."""
        match op.begun.call:
            case h.PublishCall() as call:
                self._digests[call.channel, call.version].append((call.digest, op))
            case h.PullCall() as call:
                self._newest_at[op.number] = self._newest.get(call.channel, -1)
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """See `Judge`."""
        match op.begun.call, end.result:
            case h.PublishCall() as call, _ if end.outcome == "ok":
                self._newest[call.channel] = max(call.version, self._newest.get(call.channel, -1))
            case h.PullCall() as call, h.PulledResult() as got:
                yield from self._pulled(op, call, got)

    def _pulled(self, op: Operation, call: h.PullCall, got: h.PulledResult) -> Found:
        published = self._digests.get((call.channel, got.version), ())
        if not any(digest == got.digest and not by.failed for digest, by in published):
            yield Violation(
                "torn read", f"version {got.version} was pulled with bytes that no client published", op.number
            )
        least = self._newest_at.pop(op.number, -1)
        if call.version < 0 and got.version < least:
            yield Violation(
                "lost", f"version {least} was published before a pull that was given {got.version}", op.number
            )
        wrong = got.version != call.version if call.version >= 0 else got.version <= call.above
        if wrong:
            yield Violation("weights", f"version {got.version} was given, which was not asked for", op.number)
