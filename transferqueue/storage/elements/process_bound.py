"""Base of handles that belong to one process and cannot be pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from transferqueue.errors import UsageError


class ProcessBound:
    """A handle on memory, a lease or a connection of this process. Pickling or copying it raises `UsageError`, which
    names `_remedy`."""

    __slots__ = ()

    _remedy: ClassVar[str] = "pass its values"

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} belongs to the process that has it, and cannot be pickled or copied; "
            f"{self._remedy}"
        )
