"""Makes ``import transfer_queue`` give the drop-in: one module under two names, in this process and those that it
starts.

The drop-in is imported when something first imports ``transfer_queue``. Child processes inherit the change through
``PYTHONPATH``: the folder ``transfer_queue_path`` holds a ``transfer_queue`` that only calls `install`, and it comes
before an installed one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

from transferqueue.lazy import naming_extra

ALIAS: Final = "transfer_queue"
REAL: Final = "transferqueue.adapters.transfer_queue"
FOLDER: Final = str(Path(__file__).with_name("transfer_queue_path"))


class _Alias(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(ALIAS + "."):
            return None
        with naming_extra("the drop-in for transfer_queue", "drop-in"):
            spec = importlib.util.find_spec(REAL + fullname.removeprefix(ALIAS))
        if spec is None:
            return None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=spec.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        with naming_extra("the drop-in for transfer_queue", "drop-in"):
            module = importlib.import_module(REAL + spec.name.removeprefix(ALIAS))
        self._specs = {**getattr(self, "_specs", {}), spec.name: module.__spec__}
        return module

    def exec_module(self, module: ModuleType) -> None:
        for alias, spec in list(self._specs.items()):
            if spec is not None and spec.name == module.__name__:
                module.__spec__ = spec
                del self._specs[alias]


def install() -> None:
    """Make ``import transfer_queue`` give the drop-in in this process. A second call does nothing."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
    for name in [name for name in sys.modules if name == ALIAS or name.startswith(ALIAS + ".")]:
        if not sys.modules[name].__name__.startswith(REAL):
            del sys.modules[name]


def activate() -> None:
    """Call `install` here, and in all processes that are started from here."""
    install()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])
