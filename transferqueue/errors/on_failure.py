"""Undoes the first steps of an operation whose later ones fail."""

from __future__ import annotations

from collections.abc import Callable


class OnFailure:
    """Calls ``undo(*args)`` if its block ends with any exception: an interrupt and the end of a generator too.

    Example:
        >>> from contextlib import suppress
        >>> with suppress(KeyError), OnFailure(print, "undone"):
        ...     raise KeyError("why")
        undone
    """

    __slots__ = ("_args", "_undo")

    def __init__(self, undo: Callable[..., object], *args: object) -> None:
        self._undo = undo
        self._args = args

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Undo, unless the block succeeded."""
        if kind is not None:
            self._undo(*self._args)
