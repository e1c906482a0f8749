"""The package as text: its modules by room, their classes, functions and imports. Nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

PACKAGE: Final = "transferqueue"
LOAD, LAZY, TYPING = "when loaded", "in a function", "for types only"
KINDS: Final = (LOAD, LAZY, TYPING)
"""When an import happens."""


@dataclass(frozen=True)
class Module:
    """One file. name: as it is imported. room: the folder below the package that it is in; "." for files beside the
    rooms."""

    name: str
    path: Path
    room: str

    @cached_property
    def text(self) -> str:
        """What is in the file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> int:
        """How many lines it has."""
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text)

    def classes(self) -> list[str]:
        """Names of the public classes that it defines, nested ones not among them."""
        return [node.name for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]

    def functions(self) -> Iterator[tuple[str, int]]:
        """Each function and method, and its lines from `def` to the end, docstring and comments too."""
        yield from _functions(self.tree, "")

    def imports(self) -> Iterator[tuple[str, str]]:
        """Each import: the name that is imported, as `a.b.c` for ``from a.b import c``, and when that happens."""
        yield from _imports(self.tree.body, LOAD)

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__.py`` of a folder."""
        return self.path.name == "__init__.py"


def modules(root: Path) -> dict[str, Module]:
    """All modules of the package in a tree, by name."""
    package = root / PACKAGE
    found = {}
    for folder in folders(package):
        for path in sorted(folder.glob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            name = ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            found[name] = Module(name, path, parts[0] if len(parts) > 1 else ".")
    return found


def folders(package: Path) -> Iterator[Path]:
    """The package's folder and all below it, links to folders followed."""
    yield package
    for path in sorted(package.iterdir()):
        if path.is_dir() and path.name != "__pycache__" and not path.name.startswith("."):
            yield from folders(path)


def entries(folder: Path) -> list[str]:
    """What a reader finds in a folder: files and folders, without ``__init__.py``."""
    hidden = ("__init__.py", "__pycache__")
    return sorted(path.name for path in folder.iterdir() if path.name not in hidden and path.name[0] != ".")


def _functions(node: ast.AST, within: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        name = f"{within}.{child.name}" if within and isinstance(child, _NAMED) else getattr(child, "name", within)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, (child.end_lineno or child.lineno) - child.lineno + 1
        yield from _functions(child, name if isinstance(child, _NAMED) else within)


_NAMED: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _imports(body: list[ast.stmt], when: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _imports(node.body, TYPING)
            yield from _imports(node.orelse, when)
        else:
            later = LAZY if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when == LOAD else when
            for part in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, part, []), later)
            for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from _imports(handler.body, later)
