"""Errors of the drop-in, under the names that its users catch."""

from __future__ import annotations


class LockLostError(RuntimeError):
    """Another process may hold the keys: the lease of the lock ended."""


class StorageKeyNotFoundError(KeyError, ValueError):
    """A sample has no such data."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
