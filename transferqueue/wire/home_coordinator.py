"""Several coordinators used as one: which of them has a table. This page is the whole law.

- A deployment of n coordinators has seats 1 to n. Each coordinator is told its seat when it is started, and nothing
  else of the others: they never speak to each other.
- A table, with all its rows, tasks, groups and limits, is wholly at one of them, and so is a weight channel. Which one
  follows from its name and n alone: the seat that scores highest with it (rendezvous hashing, Thaler and Ravishankar
  1998). With one seat more, the only names that move are those that move to it.
- Only what is before a name's first slash counts. ``job/rollouts`` and ``job/policy`` are together.
- A coordinator opens nothing that belongs to another seat. So whatever addresses a client was given, it cannot make a
  table at a second place; it is told what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final, Self

import msgspec
import xxhash

from transferqueue.errors import Impossible, UsageError
from transferqueue.limits import COORDINATORS_MAX, NAME_CHARS_MAX, check_name

_WRITTEN: Final = re.compile(r"(?:([^:]+):)?([0-9]{1,4})/([0-9]{1,4})")


class CoordinatorIndex(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One coordinator's: `number` of `of`, in the deployment of this name ("" is a name like any other)."""

    number: int = 1
    of: int = 1
    deployment: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of <= COORDINATORS_MAX:
            raise UsageError(
                f"coordinator {self} is no seat: there may be {COORDINATORS_MAX}, numbered from 1; with two, write 1/2 "
                "and 2/2"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """``2/3`` or ``NAME:2/3``, as `str` gives it; `UsageError` for anything else."""
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise UsageError(f"coordinator {text!r} is no seat; write which it is and of how many: 1/2, or NAME:1/2")
        return cls(int(found[2]), int(found[3]), check_name("deployment", found[1]) if found[1] else "")

    def __str__(self) -> str:
        return f"{self.deployment}:{self.number}/{self.of}".removeprefix(":")

    def check(self, kind: str, name: str) -> None:
        """`UsageError` if what has this name belongs to another seat."""
        if (home := home_coordinator(name, self.of)) != self.number:
            raise UsageError(
                f'{kind} "{name}" belongs to coordinator {home} of {self.of}, and this one is {self}; connect with the '
                f"addresses of all {self.of}, joined by commas"
            )

    def check_kept(self, tables: Iterable[str], channels: Iterable[str], where: str) -> None:
        """`UsageError` if something that is kept somewhere belongs to another seat."""
        kept = [*(("table", name) for name in tables), *(("weight channel", name) for name in channels)]
        for kind, name in kept:
            if (home := home_coordinator(name, self.of)) != self.number:
                raise UsageError(
                    f'{where} has {kind} "{name}", which belongs to coordinator {home} of {self.of}, and this one is '
                    f"{self}; go on from it with the seat that it was made at"
                )

    def check_together(self, table: str, channel: str) -> None:
        """`Impossible` if a table's clock would be a weight channel that is elsewhere: it would never move."""
        if (home := home_coordinator(channel, self.of)) != home_coordinator(table, self.of):
            raise Impossible(
                f'table "{table}" of coordinator {self} takes its clock from weight channel "{channel}" of coordinator '
                f'{home}, and these do not speak to each other: give both the same beginning, such as "{table}" and '
                f'"{table}/{channel}"'
            )


def home_coordinator(name: str, seats: int) -> int:
    """The seat, 1 to `seats`, of a name: the lowest of those with the largest xxh3-64 of ``SEAT BEGINNING``."""
    beginning = name.partition("/")[0]
    return max(range(1, seats + 1), key=lambda seat: xxhash.xxh3_64_intdigest(f"{seat} {beginning}".encode()))
