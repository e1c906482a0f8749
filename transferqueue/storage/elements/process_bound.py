"""What belongs to one process and cannot be carried to another by pickling it."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from transferqueue.errors import UsageError


class Staying:
    """A handle on memory, a lease or a connection of this process. Pickling and copying it is `UsageError`, with what to do instead."""

    __slots__ = ()

    elsewhere: ClassVar[str] = "pass its values"

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} belongs to the process that has it, and cannot be pickled or copied; {self.elsewhere}"
        )
