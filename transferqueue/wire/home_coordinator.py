"""Several coordinators used as one: which of them has a table.

- A deployment of n coordinators has seats 1 to n. Each coordinator is started with its seat, and knows nothing else of
  the others: they never communicate.
- A table, with all its rows, tasks, groups and limits, is wholly at one of them, and so is a weight channel. Its seat
  follows from its name and n alone: the seat that scores highest with it (rendezvous hashing, Thaler and Ravishankar
  1998). With one seat more, the only names that move are those that move to it.
- Only the part of a name before its first slash counts. ``job/rollouts`` and ``job/policy`` are together.
- A coordinator opens no table of another seat. So a client with wrong addresses cannot make a table at a second place:
  the error names the missing address.
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
    """The seat of one coordinator: `number` of `of`, in the deployment of this name ("" is a name like any other)."""

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
        match = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(
                f"coordinator {text!r} is no seat; write its number and the number of all: 1/2, or NAME:1/2"
            )
        return cls(int(match[2]), int(match[3]), check_name("deployment", match[1]) if match[1] else "")

    def __str__(self) -> str:
        return f"{self.deployment}:{self.number}/{self.of}".removeprefix(":")

    def check(self, kind: str, name: str) -> None:
        """`UsageError` if the table or channel of this name belongs to another seat."""
        if (home := home_coordinator(name, self.of)) != self.number:
            raise UsageError(
                f'{kind} "{name}" belongs to coordinator {home} of {self.of}, and this one is {self}; connect with the '
                f"addresses of all {self.of}, joined by commas"
            )

    def check_kept(self, tables: Iterable[str], channels: Iterable[str], where: str) -> None:
        """`UsageError` if a table or channel in a state or snapshot belongs to another seat."""
        kept = [*(("table", name) for name in tables), *(("weight channel", name) for name in channels)]
        for kind, name in kept:
            if (home := home_coordinator(name, self.of)) != self.number:
                raise UsageError(
                    f'{where} has {kind} "{name}", which belongs to coordinator {home} of {self.of}, and this one is '
                    f"{self}; go on from it with the seat that it was made at"
                )

    def check_together(self, table: str, channel: str) -> None:
        """`Impossible` if a table's clock is a weight channel at another seat: it would never move."""
        if (home := home_coordinator(channel, self.of)) != home_coordinator(table, self.of):
            raise Impossible(
                f'table "{table}" of coordinator {self} takes its clock from weight channel "{channel}" of coordinator '
                f'{home}, and these do not communicate: give both the same beginning, such as "{table}" and '
                f'"{table}/{channel}"'
            )


def home_coordinator(name: str, seats: int) -> int:
    """The seat, 1 to `seats`, of a name: the lowest seat with the largest xxh3-64 of ``SEAT BEGINNING``."""
    beginning = name.partition("/")[0]
    return max(range(1, seats + 1), key=lambda seat: xxhash.xxh3_64_intdigest(f"{seat} {beginning}".encode()))
