"""The order of tasks that their declarations imply: which follow a task, and which must be done before a column
ends."""

from __future__ import annotations

from collections.abc import Sequence

from transferqueue.policies import Pacing, Requeue, Task

TasksOfField = dict[str, tuple[str, ...]]
"""Field -> names of tasks."""


def downstream(tasks: Sequence[Task], first: Task) -> tuple[frozenset[str], list[str]]:
    """Fields that `first` gives, directly or through other tasks, and the tasks that need one of them."""
    fields = set(first.gives)
    after: dict[str, None] = {}
    grew = True
    while grew:
        grew = False
        for task in tasks:
            if task.name not in after and fields & set(task.needs):
                after[task.name] = None
                fields |= set(task.gives)
                grew = True
    return frozenset(fields), list(after)


def tasks_that_hold(tasks: Sequence[Task], pacing: Pacing | None) -> TasksOfField:
    """For each field that some task needs, the tasks that must be done with a row before its value may be freed.

    These are the tasks that need the field. If a stale row is requeued to one of them, or to a task before it, that
    task may get the row again until the pacing task is done with it; so the pacing task holds the field too.
    """
    held: TasksOfField = {}
    again = _requeued(tasks, pacing)
    needed_by: dict[str, dict[str, None]] = {}
    for task in tasks:
        for field in task.needs:
            needed_by.setdefault(field, {})[task.name] = None
    for field, holders in needed_by.items():
        if pacing is not None and not again.isdisjoint(holders):
            holders[pacing.task] = None
        held[field] = tuple(holders)
    return held


def _requeued(tasks: Sequence[Task], pacing: Pacing | None) -> frozenset[str]:
    """Tasks that may get a stale row again."""
    if pacing is None or pacing.max_staleness is None or not isinstance(pacing.on_stale, Requeue):
        return frozenset()
    target = pacing.on_stale.task
    first = next((task for task in tasks if task.name == target), None)
    return frozenset() if first is None else frozenset((target, *downstream(tasks, first)[1]))
