"""What is counted: folders, names, lengths, circles, and the places that the redesign is to remove."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from tests.house import circles
from tests.house.source import KINDS, LAZY, LOAD, PACKAGE, Module, entries, folders, modules

MESSAGES: Final = f"{PACKAGE}.wire.messages"


def measure(root: Path) -> dict[str, Any]:
    """All figures of the package in a tree."""
    known = modules(root)
    groups = groups_of_messages(known)
    functions = sorted(
        ((length, f"{name}:{function}") for name, module in known.items() for function, length in module.functions()),
        reverse=True,
    )
    lengths = [length for length, _ in functions]
    return {
        "folders": dict(
            _largest({_relative(folder, root): len(entries(folder)) for folder in folders(root / PACKAGE)})
        ),
        "class names used more than once": repeated_classes(known),
        "file names used more than once": _repeated(
            (one.path.name, str(one.path.relative_to(root))) for one in known.values() if not one.is_package
        ),
        "functions": {
            "count": len(lengths),
            "median lines": median(lengths),
            "p90 lines": quantiles(lengths, n=10)[-1],
            "longest": {name: length for length, name in functions[:10]},
        },
        "lines per room": dict(_largest(_sum((one.room, one.lines) for one in known.values()))),
        "modules per room": dict(_largest(_sum((one.room, 1) for one in known.values()))),
        "lines": sum(one.lines for one in known.values()),
        "modules": len(known),
        "circles": _circles(known),
        "ledger.state in server": sorted(
            place for one in known.values() if one.room == "server" for place in ledger_states(one)
        ),
        "message types by isinstance": sorted(place for one in known.values() for place in message_checks(one, groups)),
        "message types by match": sorted(place for one in known.values() for place in message_cases(one)),
    }


def repeated_classes(known: Mapping[str, Module]) -> dict[str, list[str]]:
    """Name of a public class -> the modules that define one of that name, where there are several."""
    return _repeated((kind, name) for name, one in known.items() for kind in one.classes())


def _relative(folder: Path, root: Path) -> str:
    return str(folder.relative_to(root))


def _largest(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _sum(counts: Iterator[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, count in counts:
        total[name] += count
    return total


def _repeated(names: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}


def _circles(known: Mapping[str, Module]) -> dict[str, Any]:
    """Circles of modules, by the imports that they need, and circles among the entries of one folder, with the imports
    that make them."""
    levels = {LOAD: [LOAD], f"{LOAD} or {LAZY}": [LOAD, LAZY], "of any kind": list(KINDS)}
    found: dict[str, Any] = {}
    for level, kinds in levels.items():
        edges = circles.graph(known, kinds)
        found[f"of modules, imports {level}"] = [
            {"members": circle, "imports": circles.imports_between(edges, circles.shortest(edges, circle))}
            for circle in circles.strongly_connected(edges)
        ]
        found[f"of entries of a folder, imports {level}"] = [
            {"members": circle, "imports": circles.imports_between(edges, circle)}
            for circle in circles.within_folders(edges)
        ]
    return found


# ------------------------------------------------------------ places


def ledger_states(module: Module) -> list[str]:
    """Where the state of a ledger is reached: ``ledger.state`` at the end of any path."""
    return [
        _place(module, node)
        for node in _walk(module, "ledger.state")
        if isinstance(node, ast.Attribute)
        and node.attr == "state"
        and (getattr(node.value, "id", "") or getattr(node.value, "attr", "")).endswith("ledger")
    ]


def message_checks(module: Module, groups: Collection[str]) -> list[str]:
    """Where `isinstance` or `issubclass` is asked for a type of message, or for a constant that names several."""
    names = _names_of_messages(module)
    return [
        _place(module, node)
        for node in _walk(module, "isinstance", "issubclass")
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        and len(node.args) == 2
        and any(_is_message(part, names) or getattr(part, "id", "") in groups for part in ast.walk(node.args[1]))
    ]


def message_cases(module: Module) -> list[str]:
    """Where a `case` has a type of message."""
    names = _names_of_messages(module)
    return [
        _place(module, node.pattern)
        for node in _walk(module, "match ")
        if isinstance(node, ast.match_case)
        and any(isinstance(part, ast.MatchClass) and _is_message(part.cls, names) for part in ast.walk(node.pattern))
    ]


def groups_of_messages(known: Mapping[str, Module]) -> set[str]:
    """Names of constants that are types of messages and nothing else, such as ``_NOTICES = m.Unpin | m.Heartbeat``."""
    found = set()
    for module in known.values():
        names = _names_of_messages(module)
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                parts = [
                    part
                    for part in ast.walk(node.value)
                    if isinstance(part, ast.Attribute | ast.Name | ast.Call | ast.Constant)
                ]
                types = [part for part in parts if isinstance(part, ast.Attribute) and _is_message(part, names)]
                if types and len(parts) == 2 * len(types):  # m.Unpin is an attribute and a name
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def _names_of_messages(module: Module) -> set[str]:
    """What the messages, or their module, are called in this module."""
    return {
        alias.asname or alias.name
        for node in _walk(module, "messages")
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}".startswith(MESSAGES)
    }


def _is_message(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=name)) | ast.Name(id=name):
            return name in names
    return False


def _walk(module: Module, *words: str) -> Iterator[ast.AST]:
    """Every node of a module that has one of the words; else none, since a walk takes long."""
    return ast.walk(module.tree) if any(word in module.text for word in words) else iter(())


def _place(module: Module, node: Any) -> str:
    return f"{module.name}:{node.lineno}"
