"""Names of a package that are imported from its modules when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names_by_module: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`. names_by_module: for each module, relative to the package, its names, separated by spaces.

    A package that assigns it also lists the names in `__all__` and imports them under `TYPE_CHECKING`, for editors and type checkers.
    """
    modules = {name: f"{package}.{module}" for module, names in names_by_module.items() for name in names.split()}

    def getattr_of_package(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_of_package
