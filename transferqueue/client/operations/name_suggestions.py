"""Names that a call probably did not mean: ``polcy_version`` for ``policy_version``, ``timeout`` for ``timeout_s``,
``reward`` for ``rewards``.

A put, update, ack or release takes columns as keywords, so a misspelt parameter or field would silently become a new
column: rows without a version are never stale, and a task whose field has another name waits for ever. So a column that
is new to its table is compared with the names that it may have been meant for:

1. the parameters of the call, and the facts of rows;
2. the fields that the table has, and those that its tasks need or give.

A name that the same call gives too was not meant: ``put(value=..., values=...)`` has both. A name that the table
declares is never new. A table made with ``extra_fields=True`` takes every name as it comes.

Two names are near if they differ only in case and punctuation, or in one word, by one letter (two in long words), or by
the ending of a plural. Different numbers are different names (``x1``, ``x2``), and so are different short words
(``x_in``, ``x_on``). Parameters are few and their words are short, so with them a short word counts too: one with two
letters swapped (``stpe``, ``kye``), or with one wrong letter in a parameter of several words (``group_sise``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from transferqueue.client.table_info import TableInfo
from transferqueue.errors import UsageError, listing
from transferqueue.policies import Task
from transferqueue.schema import Field

FACTS: Final = (
    "group_id",
    "group_size",
    "ordinal",
    "policy_version",
    "policy_version_max",
    "tokens",
    "priority",
    "key",
    "tags",
)
"""What a put may say of its rows beside columns."""

CONTINUING: Final = ("parent", "continued")
"""What a put may say of rows that continue others."""

PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "put": (*FACTS, "reservation", *CONTINUING, "timeout_s"),
    "update": (*FACTS, "rows", "overwrite", "if_unchanged"),
    "ack": (*FACTS, "rows", "step"),
    "release": ("policy_version", "policy_version_max", "tokens", "priority", "tags", "rows", "failed", "reason"),
}
"""The parameters of each call that takes columns."""

RESERVED: Final = frozenset({*FACTS, "timeout_s", "rows", "overwrite", "if_unchanged", *CONTINUING})
"""No field may be declared with such a name: the calls that would bring it take the name for something else."""

_SHORT_FORMS: Final = {
    "timeout": "timeout_s",
    "timeout_sec": "timeout_s",
    "timeout_seconds": "timeout_s",
    "group": "group_id",
    "version": "policy_version",
    "prio": "priority",
}
"""Parameters as they are often called elsewhere."""
_WORD: Final = re.compile(r"[a-z]+|[0-9]+")
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LONG: Final = 8
"""Letters of a word in which two may be wrong."""
_WORTH: Final = 5
"""Letters of the shortest word in which one letter may be another; below, too many words are that near."""
_SWAPPED: Final = 3
"""Letters of the shortest word of a parameter in which two may be swapped."""


def check_columns(call: str, names: Iterable[str], said: Collection[str], terms: TableInfo) -> None:
    """Raise `UsageError` if a column that is new to the table was probably meant for a parameter or another field.

    `said` has the facts that the call gives.
    """
    given = list(names)
    if terms.last.extra_fields is True:
        return
    promised = _promised(terms.last.tasks)
    new = [name for name in given if name not in terms.fields and name not in promised]
    if not new:
        return
    parameters = {*PARAMETERS[call], *RESERVED}
    fields = {*terms.fields, *promised}.difference(given)
    for name in new:
        meant = name if name in parameters else _SHORT_FORMS.get(name) or nearest_parameter(name, parameters)
        if meant is not None and (meant == name or meant not in said):
            raise UsageError(_parameter_meant(call, name, meant, terms.name))
        meant = nearest(name, fields)
        if meant is not None:
            raise UsageError(_field_meant(call, name, meant, terms.name))


def check_declared(table: str, fields: Iterable[Field], tasks: Iterable[Task]) -> None:
    """Raise `UsageError` for fields that no call could bring, and for a task that needs a misspelt field of another."""
    declared = list(tasks)
    listed = list(fields)
    _check_likes(listed, {field.name for field in listed} | _promised(declared))
    named = [(f"field of table {table!r}", field.name) for field in listed]
    named += [(f"field of task {task.name!r}", name) for task in declared for name in (*task.needs, *task.gives)]
    for subject, name in named:
        if name in RESERVED:
            raise UsageError(
                f"{name!r} is named as a {subject}, but put, update and ack take {name}= for something else, so no row "
                "would ever have that column; give the field another name"
            )


def _check_likes(fields: Collection[Field], known: set[str]) -> None:
    """Raise `UsageError` for a field that is like one that is misspelt, or that has no lengths."""
    shapes = {field.name: field for field in fields}
    for field in fields:
        like = field.like
        if not like:
            continue
        meant = None if like in known else nearest(like, known - {field.name})
        if meant is not None:
            raise UsageError(
                f'field "{field.name}" is like {like!r}, and no field has that name; did you mean {meant!r}?'
            )
        other = shapes.get(like)
        if other is not None and not other.shape:
            raise UsageError(
                f'field "{field.name}" is like "{like}", which is {other.describe()}: its rows have no lengths; name '
                "one whose shape begins with None"
            )


def check_needs(tasks: Iterable[Task], fields: Iterable[str]) -> None:
    """Raise `UsageError` if a task needs a name that no field and no task has, but that is near one of `fields` or one
    that another task gives."""
    declared = list(tasks)
    for task in declared:
        given = {name for other in declared if other is not task for name in other.gives}
        _check_needs(task, {*fields, *given})


def check_new_task(task: Task, terms: TableInfo) -> None:
    """As `check_needs`, for a task that is added to a table."""
    if not terms.last.extra_fields:
        _check_needs(task, {*terms.fields, *(name for other in terms.last.tasks for name in other.gives)})


def _check_needs(task: Task, known: set[str]) -> None:
    meanable = known.difference(task.needs, task.gives)
    for name in task.needs:
        meant = None if name in known else nearest(name, meanable)
        if meant is not None:
            raise UsageError(
                f'task "{task.name}" needs {name!r}, and no field has that name and no task gives it; did you mean '
                f"{meant!r}? If both are meant, declare both as fields of the table: Field({name!r}, dtype)"
            )


def nearest(name: str, known: Collection[str]) -> str | None:
    """The name in `known` that `name` was probably meant for; None if there is none."""
    words = _words(name)
    return next((other for other in sorted(known) if other != name and _near(words, _words(other))), None)


def nearest_parameter(name: str, known: Collection[str]) -> str | None:
    """As `nearest`, for parameters."""
    words = _words(name)
    found = nearest(name, known)
    return found or next((other for other in sorted(known) if _near_parameter(words, _words(other))), None)


def _promised(tasks: Iterable[Task]) -> set[str]:
    return {name for task in tasks for name in (*task.needs, *task.gives)}


def _parameter_meant(call: str, name: str, meant: str, table: str) -> str:
    if name == meant and name in PARAMETERS[call]:
        return f"{call} has a parameter {name}, so no column of a table or dict can have that name; rename the column"
    if meant not in PARAMETERS[call]:
        takers = listing(other for other, parameters in PARAMETERS.items() if meant in parameters)
        said = f"{call} takes no {name}"
        if name == meant:
            return (
                f"{said}, and {name!r} cannot be a column, since it is a parameter of {takers}; give the column "
                "another name"
            )
        return f"{said}, and {name!r} is near {meant}, a parameter of {takers}; leave it out. {_otherwise(name, table)}"
    return f"{call} has no parameter {name!r}; did you mean {meant}? {_otherwise(name, table)}"


def _field_meant(call: str, name: str, meant: str, table: str) -> str:
    return (
        f'{call} has a column {name!r}, which table "{table}" does not have; did you mean {meant!r}? '
        f"{_otherwise(name, table)}"
    )


def _otherwise(name: str, table: str) -> str:
    return f'To add a field {name!r} to table "{table}", declare it: table.add_fields([Field({name!r}, dtype)])'


def _words(name: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub("_", name).lower())


def _near(left: list[str], right: list[str]) -> bool:
    if "".join(left) == "".join(right):
        return True
    if len(left) != len(right):
        return False
    differing = [(one, other) for one, other in zip(left, right, strict=True) if one != other]
    return len(differing) == 1 and _near_words(*differing[0])


def _near_parameter(left: list[str], right: list[str]) -> bool:
    """Whether words of a name differ from those of a parameter in one short word with a letter wrong, as the rules
    above say."""
    if len(left) != len(right):
        return False
    differing = [(one, other) for one, other in zip(left, right, strict=True) if one != other]
    if len(differing) != 1 or len(differing[0][0]) != len(differing[0][1]):
        return False
    one, other = differing[0]
    if _distance(one, other) != 1:
        return False
    swapped = sorted(one) == sorted(other)
    return len(one) >= _SWAPPED if swapped else len(left) > 1 and len(one) >= _WORTH - 1 and one[0] == other[0]


def _near_words(left: str, right: str) -> bool:
    """Whether one word was probably meant for the other."""
    if left.isdigit() or right.isdigit():
        return False
    short, long = sorted((left, right), key=len)
    if len(short) > 1 and long in _plurals(short):
        return True
    letters = len(short)
    if letters < _WORTH - 1 or abs(len(left) - len(right)) > 2:
        return False
    distance = _distance(left, right)
    if distance == 1:
        return len(left) != len(right) or (letters >= _WORTH and left[0] == right[0])
    return distance == 2 and letters >= _LONG and left[0] == right[0]


def _plurals(word: str) -> tuple[str, ...]:
    return (f"{word}s", f"{word}es", f"{word[:-1]}ies")


def _distance(left: str, right: str) -> int:
    """Letters to insert, remove, replace, or swap with their neighbour, to come from one word to the other (optimal
    string alignment)."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        last, row, earlier = row, [i], before
        for j, b in enumerate(right, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
        before = last
    return row[-1]
