"""A task that asks for whole groups never sees part of one."""

from __future__ import annotations

from collections import Counter, defaultdict

from transferqueue.policies import Complete, DeliverPartial
from transferqueue.testing.checker.base import Found, Judge, Operation, Violation
from transferqueue.testing.history import history as h


class GroupJudge(Judge):
    """Reports split groups."""

    def __init__(self) -> None:
        self._rules: dict[str, dict[str, Complete]] = defaultdict(dict)

    def declared(self, event: h.Declared) -> Found:
        """See `Judge`."""
        self._rules[event.table] = {task.name: task.groups for task in event.tasks if task.groups is not None}
        return ()

    def ended(self, op: Operation, end: h.Ended) -> Found:
        """See `Judge`."""
        call, got = op.begun.call, end.result
        if not isinstance(call, h.LeaseCall) or not isinstance(got, h.LeasedResult):
            return
        rule = self._rules[call.table].get(call.task)
        if rule is None:
            return
        sizes = dict(zip(got.group_id, got.group_size, strict=False))
        for group, members in Counter(got.group_id).items():
            least = _least(rule, sizes[group])
            if group >= 0 and not least <= members <= sizes[group]:
                yield Violation(
                    "split group",
                    f"lease {got.lease} has {members} rows of group {group}, which has {sizes[group]}",
                    op.number,
                )


def _least(rule: Complete, size: int) -> int:
    if isinstance(rule.incomplete, DeliverPartial) and rule.min_size is not None:
        return min(rule.min_size, size)
    return size
