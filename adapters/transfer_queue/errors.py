"""Errors of the drop-in, under the names that its users catch."""

from __future__ import annotations


class StorageKeyNotFoundError(KeyError, ValueError):
    """Data that a sample does not have, or no longer has."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
